"""What a profile's load consists of: arrivals, lengths, tenants and what they do, retries and faults. Values only.

contract holds them in profiles; workload_toml reads them; the schedule draws from them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts in [min, max]: constant, uniform, or lognormal (mean of the
    counts, sigma of their logarithm), drawn again until it is within."""

    dist: str
    min: int
    max: int
    mean: float = 0.0
    sigma: float = 0.0


@dataclass(frozen=True)
class Phase:
    """A stretch of constant mean rate (requests per second). Requests of unmeasured phases warm the service up.

    `tenants` narrows it to some of the profile's, the others rest. `like` names an earlier phase whose random numbers
    it draws again: the same tenants then send the same requests. `count` is the batch process's number of requests, all
    due at the start. An `unloaded` phase is a baseline: constant arrivals that must not overlap, or nothing is proven.
    `repeat` counts how often the profile's phases went before.
    """

    name: str
    rate: float
    seconds: float
    measured: bool
    tenants: tuple[str, ...] = ()
    like: str = ""
    count: int = 0
    unloaded: bool = False
    repeat: int = 0


@dataclass(frozen=True)
class TraceLine:
    """One request of a recorded trace: seconds since its start, and lengths in tokens; 0 means drawn."""

    at_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Arrivals:
    """`process` of the arrivals, its `seed`, and its phases in order. `shape` is the gamma process's (1 is Poisson)."""

    process: str
    seed: int
    shape: float
    phases: tuple[Phase, ...]
    trace: tuple[TraceLine, ...] = ()

    @property
    def repeats(self) -> int:
        return self.phases[-1].repeat + 1


@dataclass(frozen=True)
class Client:
    """How long the client waits. Reaching `max_in_flight` makes the profile INVALID: no slot is dropped in silence."""

    drain_s: float
    idle_gap_s: float
    deadline_s: float
    max_in_flight: int


@dataclass(frozen=True)
class Slow:
    """A reader that stops for `pause_s` after `after_tokens` tokens, then reads on; its windows are the smallest."""

    after_tokens: int
    pause_s: float


@dataclass(frozen=True)
class CancelPlan:
    """A `share` of the requests is cancelled, each after one of these: milliseconds since sent, or tokens received."""

    share: float
    after_ms: tuple[int, ...]
    after_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Tenant:
    """A `share` of the load with its own lengths and manners. The one without a name is a profile without tenants.

    A named tenant's requests carry the options `tenant` and, where it is given, `priority_class`.
    """

    id: str
    share: float
    priority_class: int | None
    prompt_tokens: Lengths
    output_tokens: Lengths
    slow: Slow | None = None
    cancel: CancelPlan | None = None


@dataclass(frozen=True)
class Retry:
    """A refused request is sent again, at most `max_attempts` times in all, before its first token only.

    The wait before attempt k is drawn from [0, base_ms * factor^(k-1)] ("full jitter"), from the schedule's seed.
    """

    max_attempts: int
    base_ms: float
    factor: float


@dataclass(frozen=True)
class Fault:
    """`action` is done once, `at_s` seconds after the start: kill_worker kills the decoder's process (SIGKILL)."""

    action: str
    at_s: float


@dataclass(frozen=True)
class Data:
    """Where prompts come from. synthetic: seeded words; with `shared_prefix_tokens`, each prompt begins with one of
    `prefixes` common texts of that length. quality: the contract's prompts with checkable answers, in turn."""

    source: str
    seed: int
    shared_prefix_tokens: int = 0
    prefixes: int = 1


@dataclass(frozen=True)
class QualityItem:
    """A prompt whose answer can be checked. `check`: exact, contains, regex or json; `expect` is what it compares with:
    the answer without outer space, a part of it, a pattern, or the keys that the JSON object must have."""

    id: str
    prompt: str
    max_tokens: int
    check: str
    expect: tuple[str, ...]
    options: tuple[tuple[str, bool | int | float | str], ...]

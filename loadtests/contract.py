"""The acceptance contract: what a service promises for each workload profile. Values only; contract_toml reads them.

The hash of a contract is taken over its meaning (all values, defaults included), not over its spelling.
"""

import dataclasses
from dataclasses import dataclass

from loadtests.fields import InvalidContract
from tritonforge.release import digest_of

SCHEMA = "tritonforge.contract/1"

DEFINITIONS = {
    "clock": "monotonic",
    "latency_origin": "scheduled",
    "ttft": "first_token",
    "tpot": "(last_token - first_token) / (tokens - 1)",
    "e2e": "last_token",
    "max_stall": "longest_gap_between_token_responses",
    "denominator": "issued",
    "censored": "miss",
    "shed": "miss",
    "single_token": "not_applicable",
}
"""What this verifier means by its words. A contract may repeat them, to be readable alone; other values are refused."""

EVERY, EVERY_PROVES = 1.0, 0.95
"""A quantile of EVERY: no request may exceed the limit, one that does fails the objective. No sample can prove that of
all requests, so a run without one passes when it proves, at the contract's confidence, a share of EVERY_PROVES."""


@dataclass(frozen=True)
class Expect:
    """Identity of what must have been measured; None is not compared.

    `release_digest` is compared with the release folder given to the campaign: the server is not asked for its own.
    """

    release_digest: str | None
    model_version: str | None
    server_version: str | None


@dataclass(frozen=True)
class Target:
    """The served model and how it is called. The address is no part of a contract."""

    model: str
    protocol: str
    expect: Expect


@dataclass(frozen=True)
class Statistics:
    """`confidence` of each PASS and each FAIL; `slices` and `resamples` of the block bootstrap of rates."""

    confidence: float
    slices: int
    resamples: int


@dataclass(frozen=True)
class Measurement:
    """Limits on the measurement itself: a broken one makes the profile INVALID, whatever the service did."""

    schedule_lag_p99_ms: float
    client_cpu_max: float
    issued_ratio_min: float
    messages_per_s_max: float
    prompt_token_mismatch_max: float
    output_token_mismatch_max: float
    prefix_cached_max: float
    statistics_matched_min: float
    residual_min_ms: float
    residual_violations_max: float
    in_flight_mismatch_max: float
    counter_mismatch_max: float
    single_token_max: float


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
    """A stretch of constant mean rate (requests per second). Requests of unmeasured phases warm the service up."""

    name: str
    rate: float
    seconds: float
    measured: bool


@dataclass(frozen=True)
class Arrivals:
    """`process` of the arrivals, its `seed`, and its phases in order. `shape` is the gamma process's (1 is Poisson)."""

    process: str
    seed: int
    shape: float
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class Client:
    """How long the client waits. Reaching `max_in_flight` makes the profile INVALID: no slot is dropped in silence."""

    drain_s: float
    idle_gap_s: float
    deadline_s: float
    max_in_flight: int


@dataclass(frozen=True)
class Objective:
    """One promise. Durations: `quantile` of the issued requests have `metric` <= `le`. Ratios and rates: `le` or `ge`.

    A quantile of 1.0 has a meaning of its own, see EVERY.
    `phase` narrows it to the requests scheduled in that phase; None means all measured ones.
    """

    id: str
    metric: str
    quantile: float | None
    le: float | None
    ge: float | None
    phase: str | None


@dataclass(frozen=True)
class Profile:
    """One workload with its promises."""

    id: str
    required: bool
    prompt_tokens: Lengths
    output_tokens: Lengths
    data_seed: int
    arrivals: Arrivals
    client: Client
    objectives: tuple[Objective, ...]


@dataclass(frozen=True)
class Contract:
    """A parsed contract. `sha256` identifies its meaning."""

    name: str
    revision: int
    target: Target
    statistics: Statistics
    measurement: Measurement
    profiles: tuple[Profile, ...]

    @property
    def sha256(self) -> str:
        return digest_of({"schema": SCHEMA, "definitions": DEFINITIONS, **dataclasses.asdict(self)})

    def profile(self, profile_id: str) -> Profile:
        """The profile with this id; InvalidContract when there is none."""
        for profile in self.profiles:
            if profile.id == profile_id:
                return profile
        known = ", ".join(profile.id for profile in self.profiles)
        raise InvalidContract(f"profile must be one of {known}, got {profile_id!r}")

"""The schedule: when each request is due and how long it is, computed from the contract alone before any load runs.

Load generator and verdict compute it independently: records that do not match it are not a measurement. Every stream of
random numbers has a seed of its own, so that more requests in one phase change nothing in another.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from loadtests.contract import Arrivals, Lengths, Phase, Profile
from loadtests.fields import InvalidContract
from tritonforge.release import digest_of

SECOND = 1_000_000_000


@dataclass(frozen=True)
class Slot:
    """One request to be: due `at_ns` after the start of the schedule."""

    index: int
    at_ns: int
    phase: str
    measured: bool
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Window:
    """A phase's stretch of the schedule, in nanoseconds since its start: [start_ns, end_ns)."""

    phase: Phase
    start_ns: int
    end_ns: int


def windows(arrivals: Arrivals) -> list[Window]:
    """The phases in order, each with its start and end."""
    found, start = [], 0
    for phase in arrivals.phases:
        end = start + round(phase.seconds * SECOND)
        found.append(Window(phase, start, end))
        start = end
    return found


def _gaps(arrivals: Arrivals, rng: random.Random, rate: float) -> Iterator[float]:
    """Endless gaps in seconds of mean 1 / rate."""
    while True:
        if arrivals.process == "poisson":
            yield rng.expovariate(rate)
        else:
            yield rng.gammavariate(arrivals.shape, 1 / (rate * arrivals.shape))


def arrival_times(arrivals: Arrivals, window: Window) -> list[int]:
    """Absolute due times of one phase. A constant rate is start + k / rate: errors do not add up."""
    phase, times = window.phase, []
    if arrivals.process == "constant":
        count = math.ceil(phase.seconds * phase.rate - 1e-9)
        return [window.start_ns + round(k * SECOND / phase.rate) for k in range(count)]
    rng = random.Random(f"{arrivals.seed}/arrivals/{phase.name}")
    at = 0.0
    for gap in _gaps(arrivals, rng, phase.rate):
        at += gap
        due = window.start_ns + round(at * SECOND)
        if due >= window.end_ns:
            return times
        times.append(due)
    raise AssertionError("gaps are endless")


def draw_length(lengths: Lengths, rng: random.Random) -> int:
    """One token count within [min, max]; a lognormal one is drawn again until it is within."""
    if lengths.dist == "constant":
        return lengths.min
    if lengths.dist == "uniform":
        return rng.randint(lengths.min, lengths.max)
    mu = math.log(lengths.mean) - lengths.sigma**2 / 2
    for _ in range(10_000):
        value = round(rng.lognormvariate(mu, lengths.sigma))
        if lengths.min <= value <= lengths.max:
            return value
    raise InvalidContract(f"lognormal mean {lengths.mean:g} sigma {lengths.sigma:g} hardly falls in its [min, max]")


def build_schedule(profile: Profile) -> list[Slot]:
    """All slots of a profile in order of time; the same profile always gives the same slots."""
    slots: list[Slot] = []
    for window in windows(profile.arrivals):
        phase = window.phase
        prompts = random.Random(f"{profile.data_seed}/prompt_tokens/{phase.name}")
        outputs = random.Random(f"{profile.data_seed}/output_tokens/{phase.name}")
        for at in arrival_times(profile.arrivals, window):
            lengths = draw_length(profile.prompt_tokens, prompts), draw_length(profile.output_tokens, outputs)
            slots.append(Slot(len(slots), at, phase.name, phase.measured, *lengths))
    return slots


def schedule_sha256(slots: Sequence[Slot]) -> str:
    """sha256 (hex) of the whole schedule."""
    return digest_of([asdict(slot) for slot in slots])


def shard_of(slots: Sequence[Slot], shard: int, of: int) -> list[Slot]:
    """Worker `shard`'s slots: every `of`-th one, so that the shards together are the schedule, each slot once."""
    return [slot for slot in slots if slot.index % of == shard]

"""The schedule: when each request is due and how long it is, computed from the contract alone before any load runs.

Load generator and verdict compute it independently: records that do not match it are not a measurement. Every stream of
random numbers has a seed of its own, so that more requests in one phase change nothing in another.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from loadtests.contract import Arrivals, Lengths, Phase, Profile, Tenant
from loadtests.fields import InvalidContract
from loadtests.workload import QualityItem
from tritonforge.release import digest_of

SECOND = 1_000_000_000


@dataclass(frozen=True)
class Slot:
    """One request to be: due `at_ns` after the start of the schedule.

    `tenant` "" is a profile without tenants. It is to be cancelled so many milliseconds after it was sent, or when so
    many tokens have come. `item` names a prompt of the quality set: prompt_tokens is then 0, its length is its own.
    """

    index: int
    at_ns: int
    phase: str
    measured: bool
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    cancel_after_ms: int | None = None
    cancel_after_tokens: int | None = None
    item: str = ""

    @property
    def is_cancelled(self) -> bool:
        return self.cancel_after_ms is not None or self.cancel_after_tokens is not None


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
        if arrivals.process == "gamma":
            yield rng.gammavariate(arrivals.shape, 1 / (rate * arrivals.shape))
        else:
            yield rng.expovariate(rate)


def arrival_times(arrivals: Arrivals, window: Window, tenant: str = "", share: float = 1.0) -> list[int]:
    """Absolute due times of one tenant in one phase. A constant rate is start + k / rate: errors do not add up."""
    phase, rate = window.phase, window.phase.rate * share
    if phase.count:
        return [window.start_ns] * round(phase.count * share)
    if arrivals.process == "trace":
        times = (round(line.at_s * SECOND) for line in arrivals.trace)
        return [at for at in times if window.start_ns <= at < window.end_ns]
    if arrivals.process == "constant" or phase.unloaded:
        count = math.ceil(phase.seconds * rate - 1e-9)
        return [window.start_ns + round(k * SECOND / rate) for k in range(count)]
    return _random_times(arrivals, window, _seeded(arrivals.seed, "arrivals", phase, tenant), rate)


def _random_times(arrivals: Arrivals, window: Window, rng: random.Random, rate: float) -> list[int]:
    at, times = 0.0, []
    for gap in _gaps(arrivals, rng, rate):
        at += gap
        due = window.start_ns + round(at * SECOND)
        if due >= window.end_ns:
            return times
        times.append(due)
    raise AssertionError("gaps are endless")


def _seeded(seed: int, what: str, phase: Phase, tenant: str) -> random.Random:
    """Random numbers of one thing, of one phase (or the one it is like), of one tenant, of one repeat."""
    again = f"/repeat-{phase.repeat}" if phase.repeat else ""
    return random.Random(f"{seed}/{what}/{phase.like or phase.name}" + (f"/{tenant}" if tenant else "") + again)


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
    drawn: list[Slot] = []
    for window in windows(profile.arrivals):
        for tenant in profile.everyone():
            if not window.phase.tenants or tenant.id in window.phase.tenants:
                drawn += _slots_of(profile, window, tenant)
    if profile.data.source == "quality":
        items = profile.quality
        drawn = [_asking(slot, items[k % len(items)]) for k, slot in enumerate(drawn)]
    if profile.arrivals.trace:
        drawn = _with_trace_lengths(profile.arrivals, drawn)
    names = {tenant.id: position for position, tenant in enumerate(profile.everyone())}
    ordered = sorted(drawn, key=lambda slot: (slot.at_ns, names[slot.tenant], slot.index))
    return [replace(slot, index=index) for index, slot in enumerate(ordered)]


def _slots_of(profile: Profile, window: Window, tenant: Tenant) -> Iterator[Slot]:
    """One tenant's slots of one phase, in order; their indexes are their places in it."""
    phase, data = window.phase, profile.data
    prompts = _seeded(data.seed, "prompt_tokens", phase, tenant.id)
    outputs = _seeded(data.seed, "output_tokens", phase, tenant.id)
    cancels = _seeded(data.seed, "cancel", phase, tenant.id)
    share = tenant.share if not phase.tenants or not phase.unloaded else 1.0
    for place, at in enumerate(arrival_times(profile.arrivals, window, tenant.id, share)):
        lengths = (0, 0)
        if data.source == "synthetic":
            lengths = draw_length(tenant.prompt_tokens, prompts), draw_length(tenant.output_tokens, outputs)
        cancel = _draw_cancel(tenant, cancels)
        yield Slot(place, at, phase.name, phase.measured, *lengths, tenant.id, **cancel)


def _draw_cancel(tenant: Tenant, rng: random.Random) -> dict[str, int]:
    """Whether and when a request is cancelled: each of the plan's moments is as likely as any other."""
    plan = tenant.cancel
    if plan is None or rng.random() >= plan.share:
        return {}
    moments = [("cancel_after_ms", value) for value in plan.after_ms]
    moments += [("cancel_after_tokens", value) for value in plan.after_tokens]
    return dict([rng.choice(moments)])


def _asking(slot: Slot, item: QualityItem) -> Slot:
    return replace(slot, prompt_tokens=0, output_tokens=item.max_tokens, item=item.id)


def _with_trace_lengths(arrivals: Arrivals, slots: list[Slot]) -> list[Slot]:
    """Lengths that the trace tells replace drawn ones; the slots are in the trace's order of time."""
    lines = sorted(arrivals.trace, key=lambda line: line.at_s)
    return [
        replace(
            slot,
            prompt_tokens=line.prompt_tokens or slot.prompt_tokens,
            output_tokens=line.output_tokens or slot.output_tokens,
        )
        for slot, line in zip(sorted(slots, key=lambda slot: slot.at_ns), lines, strict=True)
    ]


def schedule_sha256(slots: Sequence[Slot]) -> str:
    """sha256 (hex) of the whole schedule."""
    return digest_of([asdict(slot) for slot in slots])


def shard_of(slots: Sequence[Slot], shard: int, of: int) -> list[Slot]:
    """Worker `shard`'s slots: every `of`-th one, so that the shards together are the schedule, each slot once."""
    return [slot for slot in slots if slot.index % of == shard]

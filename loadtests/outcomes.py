"""What an objective's result is made of: which requests it speaks of, and what became of each. Pure.

The judges use it; report, plots and explanation ask the same questions here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtests.contract import Objective, Profile
from loadtests.metrics import DURATION, METRICS
from loadtests.records import CANCELLED, OK, Record

INVALID, NOT_RUN = "INVALID", "NOT_RUN"
LATE, MET, WRONG = "late", "met", "wrong"
UNKNOWN = "unknown"
"""It ended well, but its value cannot be told: a miss for a PASS, no miss for a FAIL."""


@dataclass(frozen=True)
class Result:
    """How one objective came out. `n` issued requests, `misses` by cause; `value` is the measured quantile or rate.

    `value` None with n > 0 means unbounded: the quantile lies among requests that never finished. `interval` bounds the
    value, `bounds` the compliance, both at the contract's confidence; `more_samples` is what an INCONCLUSIVE one lacks.
    `repeats` are the values of each repeat alone, where there are several.
    """

    objective: Objective
    status: str
    n: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    not_applicable: int = 0
    value: float | None = None
    interval: tuple[float | None, float | None] = (None, None)
    compliance: float | None = None
    bounds: tuple[float, float] | None = None
    more_samples: int | None = None
    repeats: tuple[float | None, ...] = ()


def in_scope(objective: Objective, records: Sequence[Record], phase: str | None = None) -> list[Record]:
    """The requests an objective speaks of, whatever became of them.

    Those of `phase` when it is given, measured or not; else of the objective's phase, or all measured ones. Requests
    that were cancelled on purpose belong to the metrics of cancellation, and to no other.
    """
    cancels = METRICS[objective.metric].part == "cancel"
    found = []
    for record in records:
        in_phase = record.phase == phase if phase else record.measured and objective.phase in (None, record.phase)
        wanted = record.cancel_ns is not None and record.status != OK if cancels else record.status != CANCELLED
        if in_phase and wanted and objective.tenant in (None, record.tenant) and record.sent_ns is not None:
            found.append(record)
    return found


def outcome(record: Record, objective: Objective) -> str | None:
    """met, late, unknown, or the status of a request that did not end well. None: this metric does not apply to it.

    Only an answer of a single token has no TPOT, stall or decode step by definition. Any other answer without a value
    came in one response, or without the server's account: what it hides may be the worst of all.
    """
    metric = METRICS[objective.metric]
    if record.status != (CANCELLED if metric.part == "cancel" else OK):
        return record.status
    value = metric.value(record)
    if value is None:
        single = record.received_tokens == 1 and objective.metric in ("tpot_ms", "max_stall_ms", "decode_step_ms")
        return None if single else UNKNOWN
    return MET if value <= limit_of(objective) else LATE


def limit_of(objective: Objective) -> int:
    """The limit of a duration objective in the unit of its formula: nanoseconds, or tokens."""
    return round(objective.le * METRICS[objective.metric].scale)


def promises_of(profile: Profile) -> list[Objective]:
    """The duration objectives that a good request of this profile meets."""
    return [o for o in profile.objectives if METRICS[o.metric].kind == DURATION and METRICS[o.metric].part is None]


def worst_of(record: Record, promises: Sequence[Objective]) -> str:
    """met when the request ended ok within every promise of its phase and tenant, else late, unknown or its status."""
    if record.status != OK:
        return record.status
    own = [p for p in promises if p.phase in (None, record.phase) and p.tenant in (None, record.tenant)]
    found = {outcome(record, promise) for promise in own}
    return next((kind for kind in (LATE, UNKNOWN) if kind in found), MET)

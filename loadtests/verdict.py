"""The verdict: a pure function of contract and records. The same records give the same verdict, bit for bit.

The campaign and `--recompute` call `judge`; nothing here reads a clock, a file or the network.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtests import metrics
from loadtests.binomial import FAIL, INCONCLUSIVE, PASS, compliance_bounds, decide, quantile_ranks, samples_needed
from loadtests.checks import Check
from loadtests.contract import EVERY, EVERY_PROVES, Contract, Objective, Profile
from loadtests.metrics import DURATION, METRICS, RATIO
from loadtests.records import OK, CampaignRun, ProfileRun, Record
from loadtests.schedule import Window, windows
from loadtests.validity import check_identity, check_profile

INVALID, NOT_RUN = "INVALID", "NOT_RUN"
LATE, MET = "late", "met"
EXIT_CODES = {PASS: 0, FAIL: 1, INVALID: 3, INCONCLUSIVE: 4, NOT_RUN: 4}
WORST_FIRST = (FAIL, INVALID, INCONCLUSIVE, NOT_RUN, PASS)
"""Of objectives and of profiles. A proven failure is not hidden by another one that could not be judged; but where the
measurement itself is broken, nothing in that profile is proven."""


@dataclass(frozen=True)
class Result:
    """How one objective came out. `n` issued requests, `misses` by cause; `value` is the measured quantile or rate.

    `value` None with n > 0 means unbounded: the quantile lies among requests that never finished. `interval` bounds the
    value, `bounds` the compliance, both at the contract's confidence; `more_samples` is what an INCONCLUSIVE one lacks.
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


@dataclass(frozen=True)
class ProfileVerdict:
    """One profile: its status, why, and everything that was looked at."""

    profile: Profile
    status: str
    reasons: tuple[str, ...]
    counts: dict[str, int]
    checks: tuple[Check, ...]
    results: tuple[Result, ...]


@dataclass(frozen=True)
class Verdict:
    """The whole campaign. `exit_code`: 0 passed, 1 failed, 3 measurement invalid, 4 undecided."""

    status: str
    reasons: tuple[str, ...]
    identity: tuple[Check, ...]
    profiles: tuple[ProfileVerdict, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]


def judge(contract: Contract, run: CampaignRun) -> Verdict:
    """Judge all profiles of a contract. A failure of a valid profile beats an invalid measurement of another one."""
    identity = check_identity(contract, run.header)
    selected = run.header.get("profiles", [])
    runs = {part.profile: part for part in run.profiles}
    verdicts = []
    for profile in contract.profiles:
        if profile.id in runs or profile.id in selected:
            verdicts.append(judge_profile(contract, profile, runs.get(profile.id, ProfileRun(profile.id, (), ()))))
        else:
            verdicts.append(ProfileVerdict(profile, NOT_RUN, ("was not run",), {}, (), ()))
    statuses = [verdict.status for verdict in verdicts if verdict.profile.required]
    status = next((status for status in WORST_FIRST if status in statuses), NOT_RUN)
    broken = tuple(check.text for check in identity if check.ok is False)
    if broken:
        status = INVALID
    reasons = broken + tuple(f"{v.profile.id}: {reason}" for v in verdicts for reason in v.reasons)
    return Verdict(status, reasons, identity, tuple(verdicts))


def judge_profile(contract: Contract, profile: Profile, run: ProfileRun) -> ProfileVerdict:
    """Judge one profile: INVALID when a check of the measurement is broken, else what its objectives say."""
    checks = check_profile(contract, profile, run)
    results = tuple(judge_objective(contract, profile, objective, run.records) for objective in profile.objectives)
    counts = dict(Counter(record.status for record in run.records))
    counts["scheduled"] = sum(counts.values())
    broken = [f"{check.name}: {check.text}" for check in checks if check.ok is False]
    statuses = [result.status for result in results]
    status = INVALID if broken else next(status for status in WORST_FIRST if status in statuses)
    reasons = broken or [describe(result) for result in results if result.status != PASS]
    return ProfileVerdict(profile, status, tuple(reasons), counts, checks, results)


def in_scope(objective: Objective, records: Sequence[Record]) -> list[Record]:
    """The measured requests an objective speaks of, whatever became of them."""
    return [r for r in records if r.measured and objective.phase in (None, r.phase) and r.sent_ns is not None]


def outcome(record: Record, objective: Objective) -> str | None:
    """met, late, or the status of a request that did not end ok. None: ok, but without a value for this metric."""
    if record.status != OK:
        return record.status
    value = METRICS[objective.metric].value(record)
    if value is None:
        return None
    return MET if value <= limit_ns(objective) else LATE


def limit_ns(objective: Objective) -> int:
    """The limit of a duration objective in nanoseconds."""
    return round(objective.le * 1_000_000)


def judge_objective(contract: Contract, profile: Profile, objective: Objective, records: Sequence[Record]) -> Result:
    """Judge one objective over the issued requests of its scope."""
    scope = in_scope(objective, records)
    kind = METRICS[objective.metric].kind
    if kind == DURATION:
        return _judge_duration(contract, objective, scope)
    if kind == RATIO:
        return _judge_ratio(contract, profile, objective, scope)
    chosen = [w for w in windows(profile.arrivals) if w.phase.measured and objective.phase in (None, w.phase.name)]
    return _judge_rate(contract, profile, objective, scope, chosen)


def _judge_duration(contract: Contract, objective: Objective, scope: list[Record]) -> Result:
    outcomes = [(record, outcome(record, objective)) for record in scope]
    applicable = [(record, found) for record, found in outcomes if found is not None]
    n, skipped = len(applicable), len(outcomes) - len(applicable)
    misses = Counter(found for _, found in applicable if found != MET)
    metric = METRICS[objective.metric].value
    values = sorted(metric(record) for record, found in applicable if found in (MET, LATE))
    confidence = contract.statistics.confidence

    def at(rank: int | None) -> float | None:
        return metrics.ms(values[rank]) if rank is not None and rank < len(values) else None

    point = -(-n * round(objective.quantile * 1_000_000) // 1_000_000) - 1 if n else None
    low, high = quantile_ranks(n, objective.quantile, confidence) if n else (None, None)
    result = _decided(contract, objective, n, dict(misses), objective.quantile)
    too_many = bool(outcomes) and skipped / len(outcomes) > contract.measurement.single_token_max
    return dataclasses.replace(
        result,
        status=INVALID if too_many else result.status,
        not_applicable=skipped,
        value=at(point),
        interval=(at(low), at(high)),
    )


def _judge_ratio(contract: Contract, profile: Profile, objective: Objective, scope: list[Record]) -> Result:
    if objective.metric == "error_ratio":
        misses = Counter(record.status for record in scope if record.status != OK)
        result = _decided(contract, objective, len(scope), dict(misses), round(1 - objective.le, 12))
        value = sum(misses.values()) / len(scope) if scope else None
    else:
        promises = [o for o in profile.objectives if METRICS[o.metric].kind == DURATION]
        misses = Counter(worst for record in scope if (worst := _worst(record, promises)) != MET)
        result = _decided(contract, objective, len(scope), dict(misses), objective.ge)
        value = result.compliance
    return dataclasses.replace(result, value=None if value is None else round(value, 6))


def _worst(record: Record, promises: Sequence[Objective]) -> str:
    """met when the request ended ok within every promise of its phase, else late or its status."""
    found = [outcome(record, promise) for promise in promises if promise.phase in (None, record.phase)]
    if record.status != OK:
        return record.status
    return LATE if LATE in found else MET


def _decided(contract: Contract, objective: Objective, n: int, misses: dict[str, int], share: float) -> Result:
    """The exact binomial decision: do at least `share` of all requests comply? Of EVERY, one miss is a FAIL."""
    missed, confidence = sum(misses.values()), contract.statistics.confidence
    every = share == EVERY
    share = EVERY_PROVES if every else share
    status = FAIL if every and missed else decide(n, missed, share, confidence)
    undecided = status == INCONCLUSIVE and missed <= n * (1 - share)
    more = samples_needed(missed, share, confidence) - n if undecided else None
    return Result(
        objective,
        status,
        n=n,
        misses=misses,
        compliance=round(1 - missed / n, 6) if n else None,
        bounds=compliance_bounds(n, missed, confidence),
        more_samples=more,
    )


def _judge_rate(
    contract: Contract, profile: Profile, objective: Objective, scope: list[Record], chosen: list[Window]
) -> Result:
    """Tokens per second with a seeded block bootstrap over time slices, resampled within each phase.

    PASS when the lower bound reaches the limit, FAIL when the upper bound stays below it, else INCONCLUSIVE.
    """
    slices, alpha = contract.statistics.slices, 1 - contract.statistics.confidence
    tokens = [metrics.tokens_in_slices(scope, w.start_ns, w.end_ns, slices) for w in chosen]
    seconds = sum(window.end_ns - window.start_ns for window in chosen) / 1e9
    rng = random.Random(f"{contract.sha256}/{profile.id}/{objective.id}")
    totals = sorted(
        sum(sum(rng.choices(block, k=slices)) for block in tokens) for _ in range(contract.statistics.resamples)
    )
    rank = int(alpha * len(totals))
    low, high = totals[rank] / seconds, totals[-1 - rank] / seconds
    status = PASS if low >= objective.ge else FAIL if high < objective.ge and scope else INCONCLUSIVE
    value = sum(map(sum, tokens)) / seconds
    return Result(objective, status, len(scope), value=round(value, 3), interval=(round(low, 3), round(high, 3)))


def describe(result: Result) -> str:
    """One sentence on an objective that did not pass, with its numbers."""
    objective = result.objective
    limit = f"at most {objective.le:g}" if objective.le is not None else f"at least {objective.ge:g}"
    if result.bounds is None:
        low, high = result.interval
        return f"{objective.id}: {result.value:g}, between {low:g} and {high:g}; {limit} is required"
    missed = ", ".join(f"{count} {cause}" for cause, count in sorted(result.misses.items())) or "none"
    text = f"{objective.id}: {sum(result.misses.values())} of {result.n} requests missed {limit} ({missed})"
    if result.status == INVALID:
        return f"{objective.id}: {result.not_applicable} requests have no {objective.metric}, too many to judge it"
    if result.status == FAIL and objective.quantile == EVERY:
        return f"{text}; no request may"
    if result.status == FAIL:
        return f"{text}; compliance is at most {result.bounds[1]:.1%}"
    more = f"; {result.more_samples} more requests like these would decide it" if result.more_samples else ""
    return f"{text}; compliance lies between {result.bounds[0]:.1%} and {result.bounds[1]:.1%}{more}"

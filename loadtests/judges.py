"""Judges one objective over the records of its scope: a judge for each kind of metric. Pure functions.

The verdict calls `judge_objective`. PASS and FAIL are claims at the contract's confidence; what the records cannot
decide is INCONCLUSIVE.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from loadtests.answers import verdict_on
from loadtests.binomial import FAIL, INCONCLUSIVE, PASS, compliance_bounds, decide, quantile_ranks, samples_needed
from loadtests.bootstrap import quantile_ratio
from loadtests.contract import EVERY, EVERY_PROVES, Contract, Objective, Profile
from loadtests.facts import fact_of
from loadtests.metrics import AVAILABILITY, COMPARISON, COUNT, DURATION, FACT, MEAN, METRICS, RATE, RATIO, in_unit
from loadtests.outcomes import INVALID, LATE, MET, UNKNOWN, Result, in_scope, outcome, promises_of, worst_of
from loadtests.records import OK, ProfileRun, Record
from loadtests.repeats import by_repeat
from loadtests.resampled import FEWEST_RESAMPLED, judge_mean, judge_rate, resampled


def judge_objective(contract: Contract, profile: Profile, objective: Objective, run: ProfileRun) -> Result:
    """Judge one objective over the issued requests of its scope, those of all repeats together.

    Exact tests pool what the repeats share; means and rates have to hold beyond what the repeats differ by, too.
    """
    result = _judge(contract, profile, objective, run)
    kind = METRICS[objective.metric].kind
    if profile.arrivals.repeats == 1 or kind in (FACT, COMPARISON, MEAN, RATE):
        return result
    parts = by_repeat(profile.arrivals, run.records)
    alone = [_judge(contract, profile, objective, dataclasses.replace(run, records=tuple(part))) for part in parts]
    return dataclasses.replace(result, repeats=tuple(part.value for part in alone))


def _judge(contract: Contract, profile: Profile, objective: Objective, run: ProfileRun) -> Result:
    kind = METRICS[objective.metric].kind
    if kind == FACT:
        return _judge_fact(profile, objective, run)
    if kind == COMPARISON:
        return _judge_comparison(contract, profile, objective, run.records)
    scope = in_scope(objective, run.records)
    if kind == DURATION:
        return _judge_duration(contract, objective, scope)
    judges = {RATIO: _judge_ratio, AVAILABILITY: _judge_availability, COUNT: _judge_count}
    judges |= {MEAN: judge_mean, RATE: judge_rate}
    return judges[kind](contract, profile, objective, scope)


def shares_claim(objective: Objective) -> float | None:
    """The share of good requests or slices that an objective claims, for the binomial test; None without one."""
    metric = METRICS[objective.metric]
    if metric.kind == DURATION:
        return EVERY_PROVES if objective.quantile == EVERY else objective.quantile
    if metric.is_share:
        return objective.ge if objective.ge is not None else round(1 - objective.le, 12)
    return round(1 - objective.max_true_rate, 12) if metric.kind == COUNT and not objective.le else None


def _judge_duration(contract: Contract, objective: Objective, scope: list[Record]) -> Result:
    outcomes = [(record, outcome(record, objective)) for record in scope]
    applicable = [(record, found) for record, found in outcomes if found is not None]
    n, skipped = len(applicable), len(outcomes) - len(applicable)
    misses = Counter(found for _, found in applicable if found != MET)
    metric = METRICS[objective.metric]
    values = sorted(metric.value(record) for record, found in applicable if found in (MET, LATE))

    def at(rank: int | None) -> float | None:
        return in_unit(metric, values[rank]) if rank is not None and rank < len(values) else None

    point = _rank(objective.quantile)(n) if n else None
    low, high = quantile_ranks(n, objective.quantile, contract.statistics.confidence) if n else (None, None)
    result = _decided(contract, objective, n, dict(misses))
    untold = skipped + misses[UNKNOWN]
    too_many = bool(outcomes) and untold / len(outcomes) > contract.measurement.single_token_max
    return dataclasses.replace(
        result,
        status=INVALID if too_many else result.status,
        not_applicable=untold,
        value=at(point),
        interval=(at(low), at(high)),
    )


def _rank(quantile: float):
    """0-based nearest rank of a quantile among n values."""
    return lambda n: -(-n * round(quantile * 1_000_000) // 1_000_000) - 1


def _judge_ratio(contract: Contract, profile: Profile, objective: Objective, scope: list[Record]) -> Result:
    if objective.metric == "error_ratio":
        found = [MET if record.status == OK else record.status for record in scope]
    elif objective.metric == "quality_ratio":
        items = {item.id: item for item in profile.quality}
        found = [verdict_on(record, items) for record in scope]
    else:
        promises = promises_of(profile)
        found = [worst_of(record, promises) for record in scope]
    misses = Counter(status for status in found if status != MET)
    result = _decided(contract, objective, len(scope), dict(misses))
    if objective.metric == "error_ratio":
        value = sum(misses.values()) / len(scope) if scope else None
    else:
        value = result.compliance
    return dataclasses.replace(result, value=None if value is None else round(value, 6))


def _judge_availability(contract: Contract, profile: Profile, objective: Objective, scope: list[Record]) -> Result:
    """Slices of the schedule, by due time: good when enough of their requests ended ok; an empty one counts nothing."""
    slices: dict[int, list[bool]] = {}
    for record in scope:
        slices.setdefault(record.scheduled_ns // round(objective.slice_s * 1e9), []).append(record.status == OK)
    bad = sum(sum(good) < objective.slice_min_good * len(good) for good in slices.values())
    result = _decided(contract, objective, len(slices), {"bad slice": bad} if bad else {})
    return dataclasses.replace(result, value=result.compliance)


def _judge_count(contract: Contract, profile: Profile, objective: Objective, scope: list[Record]) -> Result:
    """Any more than `le` fail. A limit of 0 is passed by a sample that proves the true rate; another one is a fact."""
    counted = METRICS[objective.metric].value
    found = Counter(record.status for record in scope if counted(record))
    count, n = sum(found.values()), len(scope)
    result = _decided(contract, objective, n, dict(found)) if not objective.le else Result(objective, PASS, n)
    status = FAIL if count > objective.le else result.status
    return dataclasses.replace(result, status=status if n else INCONCLUSIVE, misses=dict(found), value=count)


def _judge_comparison(contract: Contract, profile: Profile, objective: Objective, records: Sequence[Record]) -> Result:
    """A quantile in the objective's phase over the same one in another.

    A failed request counts as endless in its own phase, so that the ratio is unbounded beyond what the quantile
    forgives; in the phase compared with it is left out, which makes the comparison harder.
    """
    formula = METRICS[objective.metric].value
    own, other = in_scope(objective, records), in_scope(objective, records, objective.against)
    top, bottom = ([formula(r) if r.status == OK else None for r in scope] for scope in (own, other))
    base = [value for value in bottom if value is not None]
    if min(len(own), len(base)) < FEWEST_RESAMPLED:
        return Result(objective, INCONCLUSIVE, len(own))
    endless = 10**15
    above = [endless if value is None else value for value in top]
    rank = _rank(objective.quantile)
    value = sorted(above)[rank(len(above))] / max(sorted(base)[rank(len(base))], 1)
    draw = quantile_ratio(above, base, rank)
    result = resampled(contract, profile, objective, len(own), draw, value, min(len(own), len(base)))
    return result if value < 1e6 else dataclasses.replace(result, value=None)


def _judge_fact(profile: Profile, objective: Objective, run: ProfileRun) -> Result:
    value = fact_of(profile, objective, run)
    never = objective.metric in ("recovery_s", "fault_to_answer_ms")
    if value is None:
        return Result(objective, FAIL if never and run.records else INCONCLUSIVE, 1 if never else 0)
    return Result(objective, PASS if value <= objective.le else FAIL, 1, value=value)


def _decided(contract: Contract, objective: Objective, n: int, misses: dict[str, int]) -> Result:
    """The exact binomial decision: does the claimed share of all requests comply? Of EVERY, one miss is a FAIL.

    What is unknown counts against a PASS, but proves no FAIL.
    """
    missed, confidence = sum(misses.values()), contract.statistics.confidence
    share, known = shares_claim(objective), missed - misses.get(UNKNOWN, 0)
    every = objective.quantile == EVERY
    status = FAIL if every and missed else decide(n, missed, share, confidence)
    if status == FAIL and known < missed and not (every and known):
        status = INCONCLUSIVE if every or decide(n, known, share, confidence) != FAIL else FAIL
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

"""Judges of means and rates: what a bootstrap over one run, and the repeats of a load, say about them. Pure.

The judges call these for what is no share of requests, and has therefore no exact test.
"""

import dataclasses
from collections.abc import Sequence

from loadtests import metrics
from loadtests.binomial import FAIL, INCONCLUSIVE
from loadtests.bootstrap import block_rate, decide_interval, interval_of, mean_ratio, ratio_of
from loadtests.contract import Contract, Objective, Profile
from loadtests.metrics import METRICS
from loadtests.outcomes import Result
from loadtests.records import Record
from loadtests.repeats import between, by_repeat
from loadtests.schedule import Window, windows

FEWEST_RESAMPLED = 20
"""A bootstrap of fewer requests says more about its own resampling than about the service."""


def judge_mean(contract: Contract, profile: Profile, objective: Objective, scope: list[Record]) -> Result:
    """A mean over requests, by bootstrap; of few it says nothing.

    A bootstrap never draws what no request did. With the contract's confidence at most a share u of all requests is of
    a kind that none of n was, where (1 - u)^n = 1 - confidence: the interval reaches to the mean with u of the worst.
    """
    parts = [_pairs(objective, part) for part in by_repeat(profile.arrivals, scope)]
    pairs = [pair for part in parts for pair in part]
    if len(pairs) < FEWEST_RESAMPLED or not all(parts):
        return Result(objective, INCONCLUSIVE, len(scope))
    draw, value = mean_ratio(pairs), ratio_of(pairs)
    unseen = 1 - (1 - contract.statistics.confidence) ** (1 / len(pairs))
    worst = profile.retry.max_attempts if objective.metric == "attempts_per_request" else 0.0
    alone = [ratio_of(part) for part in parts]
    reach = (value + unseen * (worst - value), *between(alone, contract.statistics.confidence))
    return _repeats(alone, resampled(contract, profile, objective, len(scope), draw, value, len(pairs), *reach))


def _pairs(objective: Objective, records: Sequence[Record]) -> list[tuple[float, float]]:
    return [pair for record in records if (pair := METRICS[objective.metric].value(record)) is not None]


def _repeats(alone: Sequence[float], result: Result) -> Result:
    """A result with the values of the repeats, where there are several."""
    return dataclasses.replace(result, repeats=tuple(round(one, 3) for one in alone) if len(alone) > 1 else ())


def judge_rate(contract: Contract, profile: Profile, objective: Objective, scope: list[Record]) -> Result:
    """Tokens per second, or their price, with a block bootstrap over time slices, drawn again within each phase."""
    inputs = "input" in objective.metric
    count = metrics.prompts_in_slices if inputs else metrics.tokens_in_slices
    chosen = _rate_windows(profile, objective, scope)
    slices = contract.statistics.slices
    blocks = [count(scope, window.start_ns, window.end_ns, slices) for window in chosen]
    seconds = sum(window.end_ns - window.start_ns for window in chosen) / 1e9
    value, draw = sum(map(sum, blocks)) / seconds, block_rate(blocks, seconds)
    alone = _rates_alone(chosen, blocks)
    reach = between(alone, contract.statistics.confidence)
    if METRICS[objective.metric].bound == "le":
        price = contract.cost.per_hour * 1e6 / 3600

        def draw(rng, tokens_per_s=draw):
            return price / max(tokens_per_s(rng), 1e-9)

        value, alone, reach = price / max(value, 1e-9), *([price / max(x, 1e-9) for x in xs] for xs in (alone, reach))
    result = _repeats(alone, resampled(contract, profile, objective, len(scope), draw, value, slices, *reach))
    return result if scope or result.status != FAIL else dataclasses.replace(result, status=INCONCLUSIVE)


def _rates_alone(chosen: Sequence[Window], blocks: Sequence[Sequence[int]]) -> list[float]:
    """Tokens per second of each repeat."""
    found: dict[int, list[float]] = {}
    for window, counts in zip(chosen, blocks, strict=True):
        both = found.setdefault(window.phase.repeat, [0, 0.0])
        both[0], both[1] = both[0] + sum(counts), both[1] + (window.end_ns - window.start_ns) / 1e9
    return [tokens / seconds for tokens, seconds in found.values()]


def _rate_windows(profile: Profile, objective: Objective, scope: Sequence[Record]) -> list[Window]:
    """The measured phases. One whose requests are all due at its start lasts until its last token has come."""
    chosen = [w for w in windows(profile.arrivals) if w.phase.measured and objective.phase in (None, w.phase.name)]
    found = []
    for window in chosen:
        last = max((r.end_ns for r in scope if r.phase == window.phase.name and r.end_ns), default=window.end_ns)
        found.append(dataclasses.replace(window, end_ns=last + 1) if window.phase.count else window)
    return found


def resampled(
    contract: Contract, profile: Profile, objective: Objective, n: int, draw, value: float, count: int, *reach: float
) -> Result:
    """The decision by a bootstrap interval of `count` things, which covers `reach`, too."""
    low, high = interval_of(
        draw,
        value,
        count=count,
        seed=f"{contract.sha256}/{profile.id}/{objective.id}",
        resamples=contract.statistics.resamples,
        alpha=1 - contract.statistics.confidence,
    )
    low, high = min(low, *reach, high), max(high, *reach, low)
    status = decide_interval(low, high, le=objective.le, ge=objective.ge)
    return Result(objective, status, n, value=round(value, 3), interval=(round(low, 3), round(high, 3)))

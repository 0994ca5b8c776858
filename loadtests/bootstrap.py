"""Seeded bootstraps: how far a mean, a rate or a ratio of quantiles could lie from what one run saw. Pure.

The judges call it. Seeds are texts, so that the same records give the same interval on every machine. After Efron and
Tibshirani, An Introduction to the Bootstrap (1993), the percentile interval.
"""

import random
from collections.abc import Callable, Sequence

from loadtests.binomial import FAIL, INCONCLUSIVE, PASS


def interval_of(sample: Callable[[random.Random], float], *, seed: str, resamples: int, alpha: float):
    """(low, high): the percentile interval of `resamples` draws, each side at `alpha`."""
    rng = random.Random(seed)
    drawn = sorted(sample(rng) for _ in range(resamples))
    rank = int(alpha * len(drawn))
    return drawn[rank], drawn[-1 - rank]


def decide_interval(low: float, high: float, *, le: float | None, ge: float | None) -> str:
    """PASS when the whole interval is on the good side of the limit, FAIL when it is on the other, else undecided."""
    if le is not None:
        return PASS if high <= le else FAIL if low > le else INCONCLUSIVE
    return PASS if low >= ge else FAIL if high < ge else INCONCLUSIVE


def block_rate(blocks: Sequence[Sequence[int]], seconds: float) -> Callable[[random.Random], float]:
    """A draw of events per second: each phase's time slices are drawn again, as often as there are."""

    def sample(rng: random.Random) -> float:
        return sum(sum(rng.choices(block, k=len(block))) for block in blocks) / seconds

    return sample


def mean_ratio(pairs: Sequence[tuple[float, float]]) -> Callable[[random.Random], float]:
    """A draw of sum(numerators) / sum(denominators) over requests drawn again."""

    def sample(rng: random.Random) -> float:
        drawn = rng.choices(pairs, k=len(pairs))
        return sum(top for top, _ in drawn) / (sum(bottom for _, bottom in drawn) or 1)

    return sample


def quantile_ratio(top: Sequence[int], bottom: Sequence[int], rank: Callable[[int], int]):
    """A draw of quantile(top) / quantile(bottom), both drawn again; `rank` gives the order statistic of n values."""

    def sample(rng: random.Random) -> float:
        above = sorted(rng.choices(top, k=len(top)))[rank(len(top))]
        below = sorted(rng.choices(bottom, k=len(bottom)))[rank(len(bottom))]
        return above / max(below, 1)

    return sample

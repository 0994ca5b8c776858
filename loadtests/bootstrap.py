"""Seeded bootstraps: how far a mean, a rate or a ratio of quantiles could lie from what one run saw. Pure.

The judges call it. Seeds are texts, so that the same records give the same interval on every machine. After Efron and
Tibshirani, An Introduction to the Bootstrap (1993), chapter 14: the bias-corrected and accelerated interval (BCa).
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean, pstdev

from loadtests.binomial import FAIL, INCONCLUSIVE, PASS


def interval_of(
    sample: Callable[[random.Random], float], value: float, *, count: int, seed: str, resamples: int, alpha: float
) -> tuple[float, float]:
    """(low, high) around `value`, each side at `alpha`: the expanded BCa interval of `resamples` draws.

    The acceleration, which an interval of skewed things needs, is a sixth of the skewness of the draws. A bootstrap of
    few things is too narrow: it lacks Student's t and the factor sqrt(n / (n - 1)), as Hesterberg (What Teachers Should
    Know about the Bootstrap, 2015, section 4.2) says. `count` is how many things were drawn from; both sides are
    stretched by what it lacks. Without either, a service at its very limit would pass more often than `alpha`.
    """
    rng = random.Random(seed)
    drawn = sorted(sample(rng) for _ in range(resamples))
    below, above = (_accelerated(drawn, value, quantile) for quantile in (alpha, 1 - alpha))
    stretch = _stretch(count, alpha)
    return value - (value - min(below, value)) * stretch, value + (max(above, value) - value) * stretch


def _accelerated(drawn: Sequence[float], value: float, quantile: float) -> float:
    """The BCa end of the interval at `quantile`: the draw whose rank is corrected for bias and for skewness."""
    normal, count = NormalDist(), len(drawn)
    under = (bisect_left(drawn, value) + bisect_right(drawn, value)) / 2
    bias = normal.inv_cdf(min(max(under, 0.5), count - 0.5) / count)
    mean, spread = fmean(drawn), pstdev(drawn)
    skewness = fmean(((one - mean) / spread) ** 3 for one in drawn) if spread > 0 else 0.0
    moved = bias + normal.inv_cdf(quantile)
    corrected = normal.cdf(bias + moved / max(1 - skewness / 6 * moved, 0.1))
    rank = corrected * (count + 1)
    rank = math.floor(rank) if quantile < 0.5 else math.ceil(rank)
    return drawn[min(max(rank, 1), count) - 1]


def _stretch(count: int, alpha: float) -> float:
    """t(1 - alpha, n - 1) / z(1 - alpha) * sqrt(n / (n - 1)); t by its expansion in z (Abramowitz, Stegun 26.7.5)."""
    z, df = NormalDist().inv_cdf(1 - alpha), max(count - 1, 1)
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
    return t / z * (count / df) ** 0.5 if z > 0 else 1.0


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


def ratio_of(pairs: Sequence[tuple[float, float]]) -> float:
    """sum(numerators) / sum(denominators)."""
    return sum(top for top, _ in pairs) / (sum(bottom for _, bottom in pairs) or 1)


def mean_ratio(pairs: Sequence[tuple[float, float]]) -> Callable[[random.Random], float]:
    """A draw of sum(numerators) / sum(denominators) over requests drawn again."""

    def sample(rng: random.Random) -> float:
        return ratio_of(rng.choices(pairs, k=len(pairs)))

    return sample


def quantile_ratio(top: Sequence[int], bottom: Sequence[int], rank: Callable[[int], int]):
    """A draw of quantile(top) / quantile(bottom), both drawn again; `rank` gives the order statistic of n values."""

    def sample(rng: random.Random) -> float:
        above = sorted(rng.choices(top, k=len(top)))[rank(len(top))]
        below = sorted(rng.choices(bottom, k=len(bottom)))[rank(len(bottom))]
        return above / max(below, 1)

    return sample

"""Seeded bootstraps: how far a mean, a rate or a ratio of quantiles could lie from what one run saw. Pure.

The judges call it. Seeds are texts, so that the same records give the same interval on every machine. After Efron and
Tibshirani, An Introduction to the Bootstrap (1993), the percentile interval.
"""

import random
from collections.abc import Callable, Sequence
from statistics import NormalDist

from loadtests.binomial import FAIL, INCONCLUSIVE, PASS


def interval_of(
    sample: Callable[[random.Random], float], value: float, *, count: int, seed: str, resamples: int, alpha: float
) -> tuple[float, float]:
    """(low, high) around `value`, each side at `alpha`: the expanded percentile interval of `resamples` draws.

    A bootstrap of few things is too narrow: it lacks Student's t and the factor sqrt(n / (n - 1)), as Hesterberg (What
    Teachers Should Know about the Bootstrap, 2015, section 4.2) says. `count` is how many things were drawn from; both
    sides are stretched by what it lacks. Without that, a service at its very limit would pass more often than `alpha`.
    """
    rng = random.Random(seed)
    drawn = sorted(sample(rng) for _ in range(resamples))
    rank = max(int(alpha * (len(drawn) + 1)) - 1, 0)
    stretch = _stretch(count, alpha)
    low, high = min(drawn[rank], value), max(drawn[-1 - rank], value)
    return value - (value - low) * stretch, value + (high - value) * stretch


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

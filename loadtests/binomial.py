"""Exact binomial statistics: what n requests with m misses prove about the share that meets a limit.

The verdict calls it. Decisions are made in integers, so they are the same on every machine; only the bounds that are
printed use floating point.
"""

import math
from fractions import Fraction

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"


def _exact(value: float) -> Fraction:
    """The fraction a decimal literal means: 0.95 is 19/20, not its nearest binary value."""
    return Fraction(str(value))


def _tail_terms(n: int, m: int, p: Fraction) -> int:
    """b^n * P(X <= m) for X ~ Binomial(n, a/b): an integer."""
    a, c = p.numerator, p.denominator - p.numerator
    term = c**n
    total = term
    for k in range(m):
        term = term * (n - k) * a // ((k + 1) * c)
        total += term
    return total


def at_most(n: int, m: int, p: Fraction) -> Fraction:
    """P(X <= m) for X ~ Binomial(n, p), exactly. p in (0, 1)."""
    if m < 0:
        return Fraction(0)
    if m >= n:
        return Fraction(1)
    return Fraction(_tail_terms(n, m, p), p.denominator**n)


def decide(n: int, misses: int, quantile: float, confidence: float) -> str:
    """PASS, FAIL or INCONCLUSIVE for "at least `quantile` of all requests meet the limit" after `misses` of n missed.

    PASS when P(X <= misses | n, 1 - quantile) <= 1 - confidence: so few misses would be improbable at the limit.
    FAIL when P(X >= misses | n, 1 - quantile) <= 1 - confidence: so many would be. Else INCONCLUSIVE.
    """
    if not 0 <= misses <= n:
        raise ValueError(f"misses must be in [0, {n}], got {misses}")
    p, alpha = 1 - _exact(quantile), 1 - _exact(confidence)
    if at_most(n, misses, p) <= alpha:
        return PASS
    if 1 - at_most(n, misses - 1, p) <= alpha:
        return FAIL
    return INCONCLUSIVE


def samples_needed(misses: int, quantile: float, confidence: float) -> int:
    """The smallest n at which `misses` misses still give PASS."""
    p, alpha = 1 - _exact(quantile), 1 - _exact(confidence)
    low, high = misses, misses + 1
    while at_most(high, misses, p) > alpha:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at_most(middle, misses, p) > alpha else (low, middle)
    return high


def _float_at_most(n: int, m: int, p: float) -> float:
    """P(X <= m) in floating point, for printed bounds only: the incomplete beta function I(1 - p; n - m, m + 1)."""
    if m >= n or p <= 0:
        return 1.0
    if m < 0 or p >= 1:
        return 0.0
    a, b, x = n - m, m + 1, 1 - p
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_fraction(b, a, p)
    return _beta_fraction(a, b, x)


def _beta_fraction(a: int, b: int, x: float) -> float:
    """I(x; a, b) by its continued fraction (Lentz), which converges fast for x below its mean."""
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for k in range(1, 1000):
        for numerator in (
            k * (b - k) * x / ((a + 2 * k - 1) * (a + 2 * k)),
            -(a + k) * (a + b + k) * x / ((a + 2 * k) * (a + 2 * k + 1)),
        ):
            d = 1 / ((1 + numerator * d) or tiny)
            c = (1 + numerator / c) or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * value / a


def _solve(function, target: float) -> float:
    """p in [0, 1] where the decreasing `function` crosses `target`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > target else (low, middle)
    return (low + high) / 2


def compliance_bounds(n: int, misses: int, confidence: float) -> tuple[float, float]:
    """One-sided Clopper-Pearson bounds (lower, upper) of the share that meets the limit, each at `confidence`.

    Without samples nothing is known: (0, 1).
    """
    if n == 0:
        return 0.0, 1.0
    alpha = 1 - confidence
    most_misses = _solve(lambda p: _float_at_most(n, misses, p), alpha) if misses < n else 1.0
    fewest_misses = _solve(lambda p: _float_at_most(n, misses - 1, p), 1 - alpha) if misses > 0 else 0.0
    return round(1 - most_misses, 6), round(1 - fewest_misses, 6)


def quantile_ranks(n: int, quantile: float, confidence: float) -> tuple[int | None, int | None]:
    """0-based ranks (low, high) of the order statistics that bound the `quantile`, each side at `confidence`.

    None where the sample is too small to bound that side.
    """
    alpha = 1 - confidence
    low = next((k for k in range(_start(n, quantile), -1, -1) if _float_at_most(n, k, quantile) <= alpha), None)
    high = next((k for k in range(_start(n, quantile), n) if _float_at_most(n, k, quantile) >= 1 - alpha), None)
    return low, high


def _start(n: int, quantile: float) -> int:
    return min(n - 1, math.ceil(n * quantile)) if n else 0

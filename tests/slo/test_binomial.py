"""The decision rule against its definition, the published sample sizes, and simulated services of known compliance."""

import random
from fractions import Fraction
from math import comb

import pytest

from loadtests.binomial import _float_at_most, at_most, compliance_bounds, decide, quantile_ranks, samples_needed

SAMPLES = {
    (0.90, 0.95): [29, 46, 61, 76, 89, 103],
    (0.95, 0.95): [59, 93, 124, 153, 181, 208],
    (0.99, 0.95): [299, 473, 628, 773, 913, 1049],
    (0.999, 0.95): [2995, 4742, 6294, 7752, 9151, 10511],
    (0.90, 0.99): [44, 64, 81, 97, 113, 127],
    (0.95, 0.99): [90, 130, 165, 198, 229, 259],
    (0.99, 0.99): [459, 662, 838, 1001, 1157, 1307],
    (0.999, 0.99): [4603, 6636, 8403, 10042, 11601, 13105],
}


@pytest.mark.parametrize(("claim", "expected"), SAMPLES.items())
def test_sample_sizes_of_a_claim(claim, expected):
    """Wrong: a contract would be called decided with too few requests, or need more than it must."""
    assert [samples_needed(misses, *claim) for misses in range(6)] == expected


def test_the_tail_is_the_sum_of_its_terms():
    """Wrong: every decision rests on a probability that is not the binomial one."""
    p = Fraction(3, 20)
    for m in range(-1, 12):
        direct = sum((comb(11, k) * p**k * (1 - p) ** (11 - k) for k in range(m + 1)), Fraction(0))
        assert at_most(11, m, p) == min(direct, 1)


@pytest.mark.parametrize(
    ("n", "misses", "expected"),
    [(59, 0, "PASS"), (58, 0, "INCONCLUSIVE"), (59, 1, "INCONCLUSIVE"), (93, 1, "PASS"), (0, 0, "INCONCLUSIVE")],
)
def test_decisions_at_the_edge(n, misses, expected):
    assert decide(n, misses, 0.95, 0.95) == expected


def test_more_misses_never_make_it_better():
    """Wrong: a service could pass by failing more."""
    order = {"PASS": 0, "INCONCLUSIVE": 1, "FAIL": 2}
    for n in (1, 59, 93, 300):
        ranks = [order[decide(n, misses, 0.95, 0.95)] for misses in range(n + 1)]
        assert ranks == sorted(ranks)
    assert decide(300, 300, 0.95, 0.95) == "FAIL"


@pytest.mark.parametrize("n", [59, 93, 473, 1000])
def test_false_decisions_are_as_rare_as_promised(n):
    """Wrong: at the very limit a service would pass, or fail, more often than one time in twenty."""
    p = Fraction(1, 20)
    decisions = [decide(n, misses, 0.95, 0.95) for misses in range(n + 1)]
    passing = max((m for m, d in enumerate(decisions) if d == "PASS"), default=-1)
    failing = min(m for m, d in enumerate(decisions) if d == "FAIL")
    assert at_most(n, passing, p) <= Fraction(1, 20)
    assert 1 - at_most(n, failing - 1, p) <= Fraction(1, 20)


def test_simulated_services_below_at_and_above_the_limit():
    """2,000 runs of 473 requests: false PASS at most 5% at the limit, hardly ever below; good services pass."""
    rng, n, runs = random.Random(1), 473, 2000
    decisions = [decide(n, misses, 0.95, 0.95) for misses in range(n + 1)]
    share = {}
    for compliance in (0.93, 0.95, 0.985):
        outcomes = [decisions[sum(rng.random() >= compliance for _ in range(n))] for _ in range(runs)]
        share[compliance] = {kind: outcomes.count(kind) / runs for kind in ("PASS", "FAIL")}
    assert share[0.95]["PASS"] <= 0.05
    assert share[0.95]["FAIL"] <= 0.05
    assert share[0.93]["PASS"] <= 0.005
    assert share[0.985]["PASS"] >= 0.95
    assert share[0.985]["FAIL"] == 0


def test_bounds_agree_with_the_decision():
    """Wrong: the report would print "compliance at least 94%" beside a PASS that requires 95%."""
    for n, misses in ((59, 0), (93, 1), (93, 4), (200, 30), (1204, 97)):
        low, high = compliance_bounds(n, misses, 0.95)
        assert (low >= 0.95 - 1e-6) == (decide(n, misses, 0.95, 0.95) == "PASS")
        assert (high <= 0.95 + 1e-6) == (decide(n, misses, 0.95, 0.95) == "FAIL")
    assert compliance_bounds(1204, 97, 0.95)[1] == pytest.approx(0.9320, abs=5e-5)
    assert compliance_bounds(0, 0, 0.95) == (0.0, 1.0)


@pytest.mark.parametrize(("n", "p"), [(1, 0.5), (59, 0.05), (93, 0.9), (1204, 0.08), (10_000, 0.001)])
def test_printed_probabilities_are_the_exact_ones(n, p):
    """Wrong: bounds in the report would disagree with the decision, which is made in integers."""
    for m in {0, n // 50, n // 10, n // 2, n - 1}:
        assert _float_at_most(n, m, p) == pytest.approx(float(at_most(n, m, Fraction(str(p)))), rel=1e-9, abs=1e-12)


def test_interval_of_a_quantile_covers_it():
    """Wrong: the interval printed beside a percentile would miss the true one more often than it says."""
    rng, n, runs = random.Random(2), 200, 1500
    low, high = quantile_ranks(n, 0.95, 0.95)
    assert quantile_ranks(20, 0.95, 0.95)[1] is None
    below = above = 0
    for _ in range(runs):
        sample = sorted(rng.random() for _ in range(n))
        below += sample[high] < 0.95
        above += sample[low] > 0.95
    assert below / runs <= 0.06
    assert above / runs <= 0.06

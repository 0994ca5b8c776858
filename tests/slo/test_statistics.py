"""What the verdict's statistics promise: how often a service at its limit passes, over 2,000 simulated runs each."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from slo_support import change_part, failing, make_run

from loadtests.binomial import FAIL, INCONCLUSIVE, PASS, at_most, decide, samples_needed
from loadtests.bootstrap import block_rate, decide_interval, interval_of, mean_ratio, quantile_ratio
from loadtests.contract_toml import parse_contract
from loadtests.fields import InvalidContract
from loadtests.judges import judge_objective
from loadtests.lint import lint
from loadtests.verdict import judge

RUNS, CONFIDENCE = 2000, 0.95
NOISE = 3 * (0.05 * 0.95 / RUNS) ** 0.5
"""Three standard deviations of a share of 5% over 2,000 runs: a simulation may exceed its truth by that."""


@cache
def decided(n: int, misses: int, quantile: float) -> str:
    return decide(n, misses, quantile, CONFIDENCE)


def shares(n: int, quantile: float, truth: float, seed: int = 1) -> dict[str, float]:
    """How often each verdict comes out of 2,000 runs of n requests, of which a share `truth` really complies."""
    missed = np.random.default_rng(seed).binomial(n, 1 - truth, RUNS)
    values, counts = np.unique(missed, return_counts=True)
    found = dict.fromkeys((PASS, FAIL, INCONCLUSIVE), 0.0)
    for misses, count in zip(values.tolist(), counts.tolist(), strict=True):
        found[decided(n, misses, quantile)] += count / RUNS
    return found


@pytest.mark.parametrize("quantile", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("n", [59, 93, 299, 1000])
def test_a_service_at_its_limit_passes_in_at_most_one_run_of_twenty(n, quantile):
    """Wrong: the confidence that a report states would be a decoration. The same holds for FAIL."""
    found = shares(n, quantile, quantile)
    assert found[PASS] <= 0.05 + NOISE
    assert found[FAIL] <= 0.05 + NOISE
    exact = sum(
        float(at_most(n, m, 1 - _fraction(quantile)) - at_most(n, m - 1, 1 - _fraction(quantile)))
        for m in range(n + 1)
        if m <= n * 0.2 and decided(n, m, quantile) == PASS
    )
    assert exact <= 0.05
    assert abs(found[PASS] - exact) <= NOISE


def _fraction(value: float):
    from fractions import Fraction

    return Fraction(str(value))


@pytest.mark.parametrize("quantile", [0.9, 0.95])
def test_a_bad_service_does_not_pass_and_a_good_one_does(quantile):
    """Wrong: a verdict that is never wrong because it never decides."""
    below, above = (shares(1000, quantile, quantile + step) for step in (-0.03, 0.03))
    assert below[PASS] <= 0.001
    assert below[FAIL] >= 0.8
    assert above[FAIL] <= 0.001
    assert above[PASS] >= 0.95


@pytest.mark.parametrize("quantile", [0.9, 0.95, 0.99])
def test_one_more_miss_never_helps(quantile):
    """Wrong: a service could improve its verdict by failing a request."""
    order = {PASS: 0, INCONCLUSIVE: 1, FAIL: 2}
    for n in (29, 59, 300):
        ranks = [order[decided(n, misses, quantile)] for misses in range(n + 1)]
        assert ranks == sorted(ranks)


TABLE = {
    (0.9, 0.95): (29, 46, 61, 76, 89, 103),
    (0.95, 0.95): (59, 93, 124, 153, 181, 208),
    (0.99, 0.95): (299, 473, 628, 773, 913, 1049),
    (0.999, 0.95): (2995, 4742, 6294, 7752, 9151, 10511),
    (0.9, 0.99): (44, 64, 81, 97, 113, 127),
    (0.95, 0.99): (90, 130, 165, 198, 229, 259),
    (0.99, 0.99): (459, 662, 838, 1001, 1157, 1307),
    (0.999, 0.99): (4603, 6636, 8403, 10042, 11601, 13105),
}


@pytest.mark.parametrize(("quantile", "confidence"), TABLE)
def test_the_table_of_sample_sizes(quantile, confidence):
    """Golden values of the exact binomial test; 0 misses are the known 59 for p95 at 95% (rule of three: 3 / 0.05)."""
    found = tuple(samples_needed(misses, quantile, confidence) for misses in range(6))
    assert found == TABLE[quantile, confidence]


def passes(values, limit: float, draw, count: int, run: int, *, ge: bool) -> bool:
    low, high = interval_of(draw, values, count=count, seed=str(run), resamples=100, alpha=0.05)
    return decide_interval(low, high, le=None if ge else limit, ge=limit if ge else None) == PASS


def test_a_rate_at_its_limit_passes_in_at_most_one_run_of_twenty():
    """Ten slices are few: without its correction the bootstrap passes a service at its limit in 8% of all runs."""
    rng = np.random.default_rng(5)
    slices = rng.poisson(30, (RUNS, 10)) * 20
    hits = 0
    for run, block in enumerate(slices.tolist()):
        hits += passes(sum(block) / 10, 600.0, block_rate([block], 10.0), 10, run, ge=True)
    assert hits / RUNS <= 0.05 + NOISE
    assert hits / RUNS >= 0.02  # and it does decide


def test_a_mean_at_its_limit_passes_in_at_most_one_run_of_twenty():
    rng = np.random.default_rng(6)
    attempts = 1 + rng.binomial(3, 0.2, (RUNS, 60))
    hits = sum(
        passes(sum(row) / 60, 1.6, mean_ratio([(value, 1) for value in row]), 60, run, ge=False)
        for run, row in enumerate(attempts.tolist())
    )
    assert hits / RUNS <= 0.05 + NOISE


RETRIED = {
    "id": "o",
    "metric": "attempts_per_request",
    "le": 1.05,
}


@pytest.mark.parametrize("requests", [20, 40, 60])
def test_a_mean_of_rare_events_at_its_limit_passes_in_at_most_one_run_of_twenty(document, requests):
    """One of twenty requests is retried. A bootstrap that saw none draws none: of 20 requests, a third of all runs."""
    profile = document["profiles"][0]
    profile |= {"objectives": [RETRIED], "retry": {"max_attempts": 2}}
    profile["arrivals"] = {"process": "batch", "seed": 1, "phases": [{"name": "b", "seconds": 1, "count": requests}]}
    contract = parse_contract(document)
    [run] = make_run(contract).profiles
    [objective] = contract.profiles[0].objectives
    probability, passed = np.random.default_rng(8).binomial(requests, 0.05, RUNS), {}
    for retried in set(probability.tolist()):
        records = [replace(r, attempts=((0, 0, "shed"),)) if r.index < retried else r for r in run.records]
        result = judge_objective(contract, contract.profiles[0], objective, replace(run, records=tuple(records)))
        passed[retried] = result.status == PASS
    assert sum(passed[retried] for retried in probability.tolist()) / RUNS <= 0.05 + NOISE


def test_lint_refuses_a_mean_that_its_requests_cannot_prove(document):
    """Wrong: a run would be made whose best outcome is INCONCLUSIVE."""
    profile = document["profiles"][0]
    profile |= {"objectives": [RETRIED], "retry": {"max_attempts": 3}}
    contract = parse_contract(document)  # 2.5% of all requests may need the three attempts: 119 without one prove that
    with pytest.raises(InvalidContract, match="needs at least 119 requests"):
        lint(contract, contract.profiles[0])
    profile["objectives"] = [RETRIED | {"le": 1.1}]
    contract = parse_contract(document)
    [need] = lint(contract, contract.profiles[0])
    assert need.needed == 59
    assert judge(contract, make_run(contract)).status == PASS
    profile["objectives"] = [RETRIED | {"le": 1.0}]
    contract = parse_contract(document)
    with pytest.raises(InvalidContract, match="can be proven by no number of requests"):
        lint(contract, contract.profiles[0])


def test_few_values_decide_no_mean_and_no_comparison(document):
    """Wrong: the one answer that told its cache hits would prove the ratio for all that failed."""
    profile = document["profiles"][0]
    profile["arrivals"]["phases"][0] |= {"rate": 60.0}
    profile["objectives"] = [
        {"id": "hits", "metric": "prefix_hit_ratio", "ge": 0.5},
        {"id": "ratio", "metric": "ttft_against_phase", "quantile": 0.5, "le": 9, "against": "warmup"},
    ]
    contract = parse_contract(document)

    def found(change):
        run = make_run(contract, lambda r: replace(r, statistics={**r.statistics, "cached_tokens": r.prompt_tokens}))
        records = tuple(map(change, run.profiles[0].records))
        results = judge(contract, change_part(run, records=records)).profiles[0].results
        return [result.status for result in results]

    assert found(lambda r: r) == [PASS, PASS]
    assert found(lambda r: r if r.index % 10 == 0 else failing(r)) == [INCONCLUSIVE, INCONCLUSIVE]


def test_a_ratio_of_medians_at_its_limit_passes_in_at_most_one_run_of_ten():
    """Medians of 40: the percentile interval of a quantile is a rough one; what it promises is half as much."""
    rng = np.random.default_rng(7)
    base, own = (rng.lognormal(np.log(scale), 0.4, (400, 40)) for scale in (1e8, 2e8))
    rank = lambda n: n // 2  # noqa: E731
    hits = 0
    for run, (one, two) in enumerate(zip(own.astype(int).tolist(), base.astype(int).tolist(), strict=True)):
        value = sorted(one)[20] / sorted(two)[20]
        hits += passes(value, 2.0, quantile_ratio(one, two, rank), 40, run, ge=False)
    assert hits / 400 <= 0.10


def test_the_same_seed_gives_the_same_interval():
    """Wrong: a recomputed verdict could differ from the first one."""
    block = [3, 5, 2, 8, 1, 9, 4, 4, 6, 2]
    given = {"count": 10, "seed": "a/b/c", "resamples": 500, "alpha": 0.05}
    first, again = (interval_of(block_rate([block], 10.0), 4.4, **given) for _ in range(2))
    assert first == again
    assert first != interval_of(block_rate([block], 10.0), 4.4, **given | {"seed": "other"})

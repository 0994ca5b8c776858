"""A canary's verdict: of its own requests only, exact, and never a pass without enough of them."""

from pathlib import Path

import pytest

from loadtests.binomial import FAIL, INCONCLUSIVE, PASS
from loadtests.canary_judge import judge, parse, worst
from loadtests.contract_toml import load_contract
from loadtests.export_indicators import FINISHED, HISTOGRAMS, PREFIX, REFUSED, boundary, why_not
from loadtests.fields import InvalidContract
from loadtests.metrics import DURATION, METRICS

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def contract():
    return load_contract(ROOT / "loadtests/contracts/demo.toml")


def page(contract, *, version: int, good: int, late: int = 0, failed: int = 0, refused: int = 0) -> str:
    """A metrics page of one version: `good` requests keep every promise, `late` ones break each duration."""
    labels, lines = f'model="decoder",version="{version}"', []
    for objective in contract.profiles[0].objectives:
        if METRICS[objective.metric].kind == DURATION and why_not(contract.profiles[0], objective) is None:
            name = f"{PREFIX}_{HISTOGRAMS[objective.metric]}"
            lines.append(f'{name}_bucket{{{labels},le="{boundary(objective)}"}} {good}')
            lines += [f'{name}_bucket{{{labels},le="+Inf"}} {good + late}', f"{name}_count{{{labels}}} {good + late}"]
    lines.append(f'{FINISHED}{{finish_reason="stop",{labels}}} {good + late}')
    lines.append(f'{FINISHED}{{finish_reason="error",{labels}}} {failed}')
    lines.append(f"{REFUSED}{{{labels}}} {refused}")
    return "\n".join(lines) + "\n"


def verdict(contract, text: str, version: int = 999) -> str:
    return worst(judge(contract, contract.profiles[0], parse(text, version))[0])


def test_enough_good_requests_keep_the_contract(contract):
    assert verdict(contract, page(contract, version=999, good=2000)) == PASS


def test_too_few_requests_decide_nothing(contract):
    assert verdict(contract, page(contract, version=999, good=0)) == INCONCLUSIVE
    assert verdict(contract, page(contract, version=999, good=5)) == INCONCLUSIVE


def test_many_late_requests_break_it(contract):
    assert verdict(contract, page(contract, version=999, good=500, late=500)) == FAIL


@pytest.mark.parametrize("lost", ["failed", "refused"])
def test_requests_without_an_answer_break_it(contract, lost):
    """Wrong: a release that refuses everything slow would look fast."""
    assert verdict(contract, page(contract, version=999, good=500, **{lost: 500})) == FAIL


def test_the_stable_releases_requests_say_nothing_of_the_canary(contract):
    text = page(contract, version=1000, good=0, late=5000) + page(contract, version=999, good=2000)
    assert verdict(contract, text) == PASS
    assert verdict(contract, text, 1000) == FAIL


def test_a_limit_that_is_no_bucket_is_refused_with_the_remedy(contract):
    text = "\n".join(line for line in page(contract, version=999, good=100).splitlines() if 'le="1.5"' not in line)
    with pytest.raises(InvalidContract, match=r"no bucket that ends at 1\.5 s; serve with --histogram-buckets"):
        verdict(contract, text)

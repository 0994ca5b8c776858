"""The capacity search against services of known capacity, the contracts it derives, and one search on a real stub."""

import json
import random
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slo_stub import Stub
from slo_support import DOCUMENT, ROOT, to_toml

from loadtests.capacity import Asked, find_capacity
from loadtests.capacity_contract import ALLOWED_MISSES, at_rate, choose_profile, mean_rate, requests_needed
from loadtests.capacity_search import INCONCLUSIVE, INVALID, PASS, Trial, find_knee, search
from loadtests.capacity_toml import to_toml as write_toml
from loadtests.capacity_trials import Trials
from loadtests.contract_toml import parse_contract
from loadtests.fields import InvalidContract
from loadtests.lint import lint
from loadtests.schedule import build_schedule
from tritonforge import cli


def trial(rate: float, status: str, purpose: str = "test", **values) -> Trial:
    made = Trial(
        rate=rate,
        purpose=purpose,
        status=status,
        requests=100,
        achieved_rps=rate,
        output_tokens_per_s=50 * rate,
        in_flight=1.0,
        e2e_p50_ms=1000.0,
        ttft_p95_ms=100.0,
        tpot_p95_ms=10.0,
    )
    return replace(made, **values)


def service(capacity: float):
    """A service that holds up to `capacity` requests per second, and not beyond."""
    return lambda rate, purpose, longer: trial(rate, PASS if rate <= capacity else "FAIL", purpose)


@given(st.floats(0.5, 500), st.floats(0.5, 500), st.sampled_from([0.05, 0.1, 0.3]))
def test_the_capacity_of_a_sharp_service_is_found_within_the_tolerance(capacity, start, tolerance):
    found = search(service(capacity), start, tolerance=tolerance, max_trials=60)
    assert found.capacity <= capacity < found.upper
    assert found.upper / found.capacity <= 1 + tolerance or found.upper - found.capacity <= 0.02 * capacity
    assert found.confirmed
    assert found.trials[-1].purpose == "confirm"


@given(st.integers(0, 10_000))
def test_a_noisy_service_never_gets_a_rate_that_failed_its_last_trial(seed):
    """Wrong: of many trials the luckiest one would be reported."""
    rng = random.Random(seed)

    def noisy(rate, purpose, longer):
        return trial(rate, PASS if rng.random() < 1 / (1 + (rate / 10) ** 4) else "FAIL", purpose)

    found = search(noisy, 4, max_trials=40)
    if found.confirmed:
        of_rate = [t for t in found.trials if t.rate == found.capacity]
        assert len(of_rate) >= 2 and all(t.holds for t in of_rate)
        assert not [t for t in found.trials if t.rate == found.upper][-1].holds


def test_a_contract_that_holds_nowhere_has_no_capacity():
    found = search(lambda rate, purpose, longer: trial(rate, "FAIL"), 8, max_trials=50)
    assert found.capacity is None
    assert found.lowest < 0.01


def test_an_undecided_trial_is_repeated_longer_and_what_stays_undecided_does_not_count_as_held():
    asked = []

    def undecided_above_ten(rate, purpose, longer):
        asked.append((rate, longer))
        return trial(rate, PASS if rate <= 10 else INCONCLUSIVE)

    found = search(undecided_above_ten, 8, max_trials=40)
    assert found.capacity <= 10 < found.upper
    again = [rate for rate, longer in asked if longer > 1]
    assert again == [rate for rate, longer in asked if longer == 1 and rate > 10]


def test_a_client_at_its_limit_is_not_called_the_services_capacity():
    found = search(lambda rate, purpose, longer: trial(rate, PASS if rate < 50 else INVALID), 10, max_trials=40)
    assert found.limited_by == "measurement"
    assert found.capacity < 50


def test_the_search_stops_at_the_highest_rate_that_is_allowed():
    found = search(service(1e9), 3, max_rate=20, max_trials=40)
    assert (found.capacity, found.upper, found.limited_by, found.confirmed) == (20, None, "max_rate", True)


def test_the_search_keeps_to_its_number_of_trials():
    found = search(service(300), 1, max_trials=5)
    assert len(found.trials) == 5 and found.limited_by == "max_trials"
    assert not found.confirmed


def test_the_knee_of_a_queue_is_where_throughput_per_response_time_is_greatest():
    """M/M/1 with 10/s: response time 1 / (10 - rate), so power rate * (10 - rate) is greatest at 5."""
    trials = [
        trial(rate, PASS, output_tokens_per_s=float(rate), e2e_p50_ms=1000 / (10 - rate)) for rate in range(1, 10)
    ]
    knee = find_knee(trials)
    assert (knee.rate, knee.power, knee.peak_tokens_per_s) == (5, 25.0, 9.0)
    assert find_knee([replace(t, status=INVALID) for t in trials]) is None


@given(st.floats(0.5, 200), st.integers(0, 5), st.sampled_from([0.9, 0.95, 0.99]), st.sampled_from([5.0, 30.0]))
@settings(max_examples=25)
def test_a_trial_has_the_rate_that_was_asked_for_and_enough_requests_to_pass_with_a_miss(rate, seed, quantile, least):
    document = json.loads(json.dumps(DOCUMENT))
    document["profiles"][0]["objectives"][0]["quantile"] = quantile
    made = parse_contract(tomllib.loads(write_toml(at_rate(document, "small", rate, seed=seed, min_seconds=least))))
    profile = made.profile("small")
    assert mean_rate(profile) == pytest.approx(rate, rel=0.001)
    assert sum(phase.seconds for phase in profile.arrivals.phases if phase.measured) >= least - 0.001
    for need in lint(made, profile):
        assert need.has >= requests_needed(made, need.objective, ALLOWED_MISSES)
    assert profile.client.max_in_flight >= len(build_schedule(profile))


def acceptance(name: str) -> dict:
    """A document with one profile of the acceptance contract."""
    profile = tomllib.loads((ROOT / "loadtests" / "contracts" / "profiles" / f"{name}.toml").read_text())
    return {**DOCUMENT, "profiles": [profile]}


@pytest.mark.parametrize("name", ["short-short", "long-short", "short-long", "mixed-tenants", "slow-clients"])
def test_every_loaded_profile_of_the_acceptance_contract_can_be_searched(name):
    """Wrong: tenants, phases and comparisons that a campaign takes would stop a search."""
    document = acceptance(name)
    made = parse_contract(at_rate(document, name, 2.0, seed=1, min_seconds=5))
    profile = made.profile(name)
    assert mean_rate(profile) == pytest.approx(2.0, rel=0.001) and lint(made, profile)
    assert not any(phase.unloaded for phase in profile.arrivals.phases)


@pytest.mark.parametrize(("name", "rule"), [("worker-failure", "fault must not be there"), ("batch", "with a rate")])
def test_a_profile_that_has_no_rate_or_breaks_the_service_is_refused(name, rule):
    with pytest.raises(InvalidContract, match=rule):
        at_rate(acceptance(name), name, 2.0, seed=1, min_seconds=5)


def test_a_trial_keeps_every_limit_and_leaves_out_only_the_rate_floors(document, contract):
    made = parse_contract(at_rate(document, "small", 17.0, seed=4, min_seconds=2)).profile("small")
    given_ones = contract.profile("small")
    assert made.objectives == tuple(o for o in given_ones.objectives if o.metric != "output_tokens_per_s")
    assert (made.prompt_tokens, made.output_tokens) == (given_ones.prompt_tokens, given_ones.output_tokens)
    assert made.arrivals.seed == 4
    assert document == DOCUMENT, "the given document is not touched"


def test_a_contract_of_rate_floors_alone_has_no_capacity_to_search(document):
    document["profiles"][0]["objectives"] = document["profiles"][0]["objectives"][-1:]
    with pytest.raises(InvalidContract, match=r"small\.objectives must hold more than rate floors"):
        at_rate(document, "small", 1.0, seed=1, min_seconds=1)


def test_a_contract_of_several_profiles_needs_the_name_of_one(document):
    document["profiles"].append({**document["profiles"][0], "id": "second"})
    contract = parse_contract(document)
    with pytest.raises(InvalidContract, match=r"profile must be named .* small, second"):
        choose_profile(contract, None)
    assert choose_profile(contract, "second").id == "second"


plain = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), plain, max_size=4))
def test_what_is_written_as_toml_reads_as_the_same_document(document):
    assert tomllib.loads(write_toml(document)) == document


def test_a_value_without_a_toml_form_is_refused_by_its_key():
    with pytest.raises(InvalidContract, match=r"a\.b has no TOML form here, got None"):
        write_toml({"a": {"b": None}})


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"tolerance": 0.0}, r"tolerance must be in \[0\.01, 1\], got 0"),
        ({"max_trials": 0}, r"max_trials must be in \[1, 1000\], got 0"),
        ({"start": 2000.0}, r"start must be in \(0, max_rate 1000\], got 2000"),
        ({"url": None}, "give --release or --url"),
    ],
)
def test_a_search_that_cannot_be_is_refused_before_it_starts(tmp_path, change, rule):
    asked = Asked(contract=tmp_path / "c.toml", release=None, url="127.0.0.1:1", out=tmp_path)
    with pytest.raises(InvalidContract, match=rule):
        find_capacity(replace(asked, **change))
    assert not list(tmp_path.iterdir())


def test_a_search_on_a_server_runs_whole_campaigns_and_draws_them(tmp_path, tokenizer, document):
    """Two trials, each a campaign of its own with its records; the page shows both."""
    document["measurement"] |= {"schedule_lag_p99_ms": 2000, "client_cpu_max": 1.0, "residual_min_ms": -2000}
    contract = tmp_path / "given.toml"
    contract.write_text(to_toml(document))
    lines: list[str] = []
    with Stub() as stub:
        asked = Asked(
            contract=contract,
            release=None,
            url=stub.url,
            out=tmp_path / "out",
            tokenizer=tokenizer,
            start=30.0,
            min_seconds=2.0,
            max_rate=40.0,
            max_trials=3,
        )
        result = find_capacity(asked, tell=lines.append)
    document = json.loads((tmp_path / "out" / "capacity.json").read_text())
    assert [t["rate"] for t in document["trials"]] == [30.0, 40.0, 40.0], lines
    assert document["capacity"] == 40.0 and document["limited_by"] == "max_rate" and document["confirmed"]
    assert len({(tmp_path / "out").joinpath(t["folder"], "contract.toml").read_text() for t in document["trials"]}) == 3
    page = (tmp_path / "out" / "capacity.html").read_text()
    assert page.count("<circle") == 9 and "capacity 40/s" in page and "http" not in page
    assert "40 requests/s (passed twice" in result.summary()


def test_a_trial_that_does_not_run_is_not_read_from_an_earlier_one(tmp_path, tokenizer, document):
    """Wrong: a folder that was used before would answer for a campaign that was refused."""
    trials = Trials(document, "small", "llm", "127.0.0.1:1", tmp_path, None, tokenizer, 1, 1.0)
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "report.json").write_text("{}")
    (folder / "contract.toml").write_text("schema = 1")
    with pytest.raises(InvalidContract, match=r"the trial in .* did not run: .*schema"):
        trials._campaign(folder / "contract.toml", folder)
    assert not (folder / "report.json").exists()


def test_the_command_says_in_one_line_what_it_cannot_search(tmp_path, capsys):
    assert cli.main(["capacity", "--contract", str(tmp_path / "none.toml"), "--url", "127.0.0.1:1"]) == 2
    err = capsys.readouterr().err
    assert "none.toml cannot be read" in err and len(err.splitlines()) == 1
    contract = tmp_path / "c.toml"
    contract.write_text(to_toml(DOCUMENT))
    options = ["capacity", "--contract", str(contract), "--url", "127.0.0.1:1", "--out", str(tmp_path / "out")]
    assert cli.main([*options, "--sweep", "max_num_seqs=1"]) == 2
    assert "a sweep serves variants of a release itself" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

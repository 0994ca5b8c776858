"""Contracts say what a load consists of: tenants, cancels, staircases, traces, batches, quality sets, files."""

import json

import pytest
from slo_support import ROOT

from loadtests.contract_toml import load_contract, parse_contract, read_document
from loadtests.fields import InvalidContract
from loadtests.lint import check_access, lint
from loadtests.schedule import SECOND, build_schedule, schedule_sha256, shard_of

SHORT = {"dist": "constant", "value": 8}
TENANTS = [{"id": "gold", "share": 0.25, "priority_class": 1}, {"id": "bulk", "share": 0.75, "output_tokens": SHORT}]
ACCEPTANCE = ROOT / "loadtests" / "contracts" / "acceptance.toml"


def with_profile(document, **changes):
    document["profiles"][0] |= changes
    return parse_contract(document)


def with_arrivals(document, **arrivals):
    return with_profile(document, arrivals={"seed": 5, **arrivals})


def one_objective(document, **objective):
    return with_profile(document, objectives=[{"id": "o", **objective}])


def test_tenants_share_the_load_and_draw_their_own_numbers(document):
    """Wrong: a tenant would change the other's requests, or its share would not be what the contract says."""
    phases = [{"name": "steady", "rate": 40.0, "seconds": 50}]
    arrivals = {"process": "poisson", "seed": 5, "phases": phases}
    slots = build_schedule(with_profile(document, tenants=TENANTS, arrivals=arrivals).profiles[0])
    gold = [slot for slot in slots if slot.tenant == "gold"]
    assert len(gold) / len(slots) == pytest.approx(0.25, rel=0.1)
    assert {slot.output_tokens for slot in slots if slot.tenant == "bulk"} == {8}
    assert {slot.output_tokens for slot in gold} == {6}, "without lengths of its own a tenant has the profile's"
    assert [slot.index for slot in slots] == list(range(len(slots)))
    alone = [{"name": "steady", "rate": 40.0, "seconds": 50, "tenants": ["gold"]}]
    only = build_schedule(with_profile(document, arrivals=arrivals | {"phases": alone}).profiles[0])
    assert [(s.at_ns, s.prompt_tokens) for s in only] == [(s.at_ns, s.prompt_tokens) for s in gold]


def test_a_phase_like_another_sends_the_same_requests(document):
    """Wrong: a tenant beside others would be compared with another load than the one it had alone."""
    phases = [
        {"name": "alone", "rate": 40.0, "seconds": 5, "measured": False, "tenants": ["gold"]},
        {"name": "both", "rate": 40.0, "seconds": 5, "like": "alone"},
    ]
    arrivals = {"process": "poisson", "seed": 5, "phases": phases}
    slots = build_schedule(with_profile(document, tenants=TENANTS, arrivals=arrivals).profiles[0])
    first = [(s.at_ns, s.prompt_tokens, s.output_tokens) for s in slots if s.phase == "alone"]
    again = [(s.at_ns - 5 * SECOND, s.prompt_tokens, s.output_tokens) for s in slots if s.phase == "both"]
    assert set(first) <= set(again)
    assert len(again) > len(first)


def test_a_staircase_climbs(document):
    steps = {"start": 10.0, "step": 10.0, "count": 3, "seconds": 20}
    contract = with_arrivals(document, process="step", steps=steps)
    assert [(p.name, p.rate, p.seconds) for p in contract.profiles[0].arrivals.phases] == [
        ("step-1", 10.0, 20.0),
        ("step-2", 20.0, 20.0),
        ("step-3", 30.0, 20.0),
    ]
    counts = [sum(s.phase == f"step-{k}" for s in build_schedule(contract.profiles[0])) for k in (1, 2, 3)]
    assert counts == sorted(counts)


def test_a_batch_is_due_at_once(document):
    """Wrong: an offline load would arrive in drops, and its throughput would be that of its arrivals."""
    contract = with_arrivals(document, process="batch", phases=[{"name": "all", "count": 70, "seconds": 3}])
    slots = build_schedule(contract.profiles[0])
    assert len(slots) == 70
    assert {slot.at_ns for slot in slots} == {0}


def test_a_trace_is_walked_as_it_was_recorded(document):
    lines = [[0.25, 12, 7], [0.0, 0, 0], [1.5, 9, 3]]
    contract = with_arrivals(document, process="trace", trace=lines, phases=[{"name": "r", "seconds": 2}])
    slots = build_schedule(contract.profiles[0])
    assert [slot.at_ns for slot in slots] == [0, SECOND // 4, SECOND * 3 // 2]
    assert [(slot.prompt_tokens, slot.output_tokens) for slot in slots[1:]] == [(12, 7), (9, 3)]
    assert slots[0].output_tokens == 6, "0 means drawn"
    with pytest.raises(InvalidContract, match="must end with the last phase at 1 s, got 1 lines later"):
        with_arrivals(document, process="trace", trace=lines, phases=[{"name": "r", "seconds": 1}])


def test_cancels_are_part_of_the_schedule(document):
    """Wrong: which requests are cancelled would depend on the run, and the records could not be checked for it."""
    cancel = {"share": 0.5, "after_ms": [0, 30], "after_tokens": [2]}
    contract = with_profile(document, tenants=[{"id": "t", "cancel": cancel}])
    slots = build_schedule(contract.profiles[0])
    planned = [(s.cancel_after_ms, s.cancel_after_tokens) for s in slots]
    assert set(planned) == {(None, None), (0, None), (30, None), (None, 2)}
    assert 0.3 < sum(plan != (None, None) for plan in planned) / len(planned) < 0.7
    assert schedule_sha256(slots) == schedule_sha256(build_schedule(contract.profiles[0]))
    objective = {"id": "o", "metric": "cancel_to_end_ms", "quantile": 0.9, "le": 100}
    contract = with_profile(document, objectives=[objective])
    (need,) = lint(contract, contract.profiles[0])
    assert (need.unit, need.needed) == ("cancelled requests", 29)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_shipped_profile_has_one_schedule_however_many_walk_it(workers):
    """Wrong: with several workers a request would be sent twice, or never, or by nobody's tenant."""
    for profile in load_contract(ACCEPTANCE).profiles:
        slots = build_schedule(profile)
        merged = sorted((s for k in range(workers) for s in shard_of(slots, k, workers)), key=lambda s: s.index)
        assert schedule_sha256(merged) == schedule_sha256(build_schedule(profile))


def test_the_acceptance_contract_holds_every_profile_and_takes_less_than_twenty_minutes():
    contract = load_contract(ACCEPTANCE)
    assert {"short-short", "long-short", "short-long", "mixed-tenants", "slow-clients", "cancel", "retry"} <= {
        profile.id for profile in contract.profiles
    }
    assert {"worker-failure", "batch", "shared-prefix", "quality"} <= {profile.id for profile in contract.profiles}
    assert sum(p.seconds for profile in contract.profiles for p in profile.arrivals.phases) < 1200
    for profile in contract.profiles:
        assert lint(contract, profile)


def test_included_files_become_one_document_that_means_the_same(tmp_path):
    """Wrong: the contract in a report folder would refer to files that are not there."""
    from loadtests.capacity_toml import to_toml

    document = read_document(ACCEPTANCE)
    assert "include" not in document
    (tmp_path / "one.toml").write_text(to_toml(document))
    assert load_contract(tmp_path / "one.toml").sha256 == load_contract(ACCEPTANCE).sha256


@pytest.mark.parametrize("name", ["../demo.toml", "/etc/hosts", ""])
def test_a_contract_reads_no_file_outside_its_folder(tmp_path, name):
    (tmp_path / "c.toml").write_text(f"include = [{json.dumps(name)}]\n")
    with pytest.raises(InvalidContract, match="must name a file in the folder of"):
        read_document(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"tenants": [{"id": "a", "share": 0.5}]}, "shares that add up to 1, got 0.5"),
        ({"tenants": [{"id": "a"}], "protocol": "http-sse"}, None),
        ({"tenants": [{"id": "a", "cancel": {"after_ms": [1]}}], "protocol": "http-sse"}, "no id to cancel by"),
        ({"tenants": [{"id": "a", "cancel": {}}]}, "must say after_ms, after_tokens or both"),
        (
            {"tenants": [{"id": "a", "slow": {"after_tokens": 0, "pause_s": 1}}]},
            r"after_tokens must be an integer in \[1",
        ),
        ({"retry": {"max_attempts": 1}}, r"max_attempts must be an integer in \[2"),
        ({"fault": {"action": "kill_worker", "at_s": 99}}, "at_s must lie within the schedule"),
        ({"fault": {"action": "unplug", "at_s": 1}}, "action must be one of kill_worker"),
        ({"options": {"max_tokens": 3}}, "max_tokens is set by the load generator"),
        ({"data": {"seed": 3, "shared_prefix_tokens": 8}}, "must be less than any prompt, got 8"),
        ({"data": {"seed": 3, "source": "quality"}}, "quality is missing"),
        ({"protocol": "carrier-pigeon"}, "protocol must be one of grpc-stream, http-sse"),
    ],
)
def test_loads_that_contradict_themselves_are_refused(document, changes, rule):
    if rule is None:
        with_profile(document, **changes)
        return
    with pytest.raises(InvalidContract, match=rule):
        with_profile(document, **changes)


@pytest.mark.parametrize(
    ("objective", "rule"),
    [
        ({"metric": "cancel_to_end_ms", "quantile": 0.9, "le": 1}, "cancel_to_end_ms needs a profile with cancel"),
        ({"metric": "quality_ratio", "ge": 0.9}, "quality_ratio needs a profile with quality"),
        ({"metric": "recovery_s", "le": 3}, "recovery_s needs a profile with fault"),
        ({"metric": "attempts_per_request", "le": 3}, "attempts_per_request needs a profile with retry"),
        ({"metric": "ttft_ms", "quantile": 0.9, "le": 1, "tenant": "gold"}, "tenant must be one of the profile's"),
        ({"metric": "ttft_against_phase", "quantile": 0.5, "le": 2, "against": "night"}, "against must be a phase"),
        ({"metric": "ttft_against_phase", "quantile": 0.5, "le": 2}, "against is missing"),
        ({"metric": "availability", "ge": 1.0}, "no number of samples proves 1"),
        ({"metric": "hung_requests", "le": 0, "quantile": 0.9}, "quantile: unknown key"),
    ],
)
def test_objectives_on_what_a_profile_does_not_do_are_refused(document, objective, rule):
    """Wrong: a promise about cancelled requests would pass, because there were none."""
    with pytest.raises(InvalidContract, match=rule):
        one_objective(document, **objective)


@pytest.mark.parametrize(
    ("objective", "rule"),
    [
        ({"metric": "hung_requests", "le": 0, "max_true_rate": 0.001}, "needs at least 2995 requests"),
        ({"metric": "availability", "ge": 0.9, "slice_s": 1}, r"needs at least 29 time slices to be decided, 29 s"),
        ({"metric": "cost_per_million_output_tokens", "le": 1.0}, r"needs the price of a machine: \[cost\] per_hour"),
        ({"metric": "e2e_against_phase", "quantile": 0.9, "le": 2, "against": "warmup"}, "in each of the two phases"),
        (
            {"metric": "ttft_ms", "quantile": 0.99, "le": 9},
            "needs at least 299 requests to be decided, .* s at this rate",
        ),
    ],
)
def test_lint_refuses_what_no_run_can_decide_and_says_the_shortest_that_can(document, objective, rule):
    contract = one_objective(document, **objective)
    with pytest.raises(InvalidContract, match=rule):
        lint(contract, contract.profiles[0])


def test_the_shortest_run_is_long_enough_and_hardly_longer(document):
    """Wrong: the advice of lint would be refused by lint."""
    contract = one_objective(document, metric="ttft_ms", quantile=0.95, le=300)
    (need,) = lint(contract, contract.profiles[0])
    assert need.needed == 59
    assert need.seconds == pytest.approx(59 / 40, abs=1)


@pytest.mark.parametrize("metric", ["kv_blocks_leaked", "server_rss_growth_mib"])
def test_what_the_server_must_tell_is_asked_for_before_the_load(document, metric):
    profile = one_objective(document, metric=metric, le=0).profiles[0]
    with pytest.raises(InvalidContract, match=r"give --(metrics-url|server-pid)"):
        check_access(profile, metrics_url=None, server_pid=None)
    check_access(profile, metrics_url="127.0.0.1:1", server_pid=1)

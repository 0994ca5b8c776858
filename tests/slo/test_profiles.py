"""Several profiles in one contract: which of their verdicts is the campaign's."""

from dataclasses import replace

from slo_support import change_part, failing, make_run

from loadtests.contract_toml import parse_contract
from loadtests.records import ProfileRun
from loadtests.verdict import judge


def two_profiles(document):
    second = {**document["profiles"][0], "id": "second"}
    document["profiles"].append(second)
    return parse_contract(document)


def test_a_proven_failure_is_not_hidden_by_an_invalid_profile(document):
    contract = two_profiles(document)
    run = make_run(contract, failing)
    hidden = change_part(run, shards=())
    verdict = judge(contract, hidden)
    assert [profile.status for profile in verdict.profiles] == ["INVALID", "FAIL"]
    assert verdict.exit_code == 1


def test_a_required_profile_that_was_not_run_is_no_pass(document):
    contract = two_profiles(document)
    run = make_run(contract)
    partial = replace(run, profiles=run.profiles[:1], header={**run.header, "profiles": ["small"]})
    verdict = judge(contract, partial)
    assert [profile.status for profile in verdict.profiles] == ["PASS", "NOT_RUN"]
    assert verdict.exit_code == 4
    promised = replace(run, profiles=(run.profiles[0], ProfileRun("second", (), ())))
    assert judge(contract, promised).exit_code == 3

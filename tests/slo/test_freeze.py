"""What no percentile may forgive: a freeze, one request beyond a limit of "every", and a service that crashes."""

from dataclasses import replace

import pytest
from slo_support import MS, ROOT, SECOND, broken, change_part, delayed, failing, make_run, statuses

from loadtests.contract_toml import load_contract, parse_contract
from loadtests.schedule import build_schedule
from loadtests.verdict import judge


def freeze_of_2_s(contract):
    """The server halts in the middle of a stream: that stream, and all that is due meanwhile, waits till it is over."""
    middle = [slot for slot in build_schedule(contract.profiles[0]) if slot.measured][40]
    start = middle.at_ns + 100 * MS
    end = start + 2 * SECOND

    def frozen(record):
        if start <= record.sent_ns < end:
            return delayed(record, (end - record.sent_ns) // MS)
        if not record.sent_ns < start < record.chunks[-1][0]:
            return record
        chunks = tuple((at + 2 * SECOND * (at >= start), count) for at, count in record.chunks)
        return replace(record, chunks=chunks, end_ns=record.end_ns + 2 * SECOND)

    return make_run(contract, frozen)


def test_one_freeze_of_2_s_fails_the_demo_and_nothing_else_in_it_would():
    """Wrong: two seconds of silence in a run of 45 s pass, because p95 forgives the few requests they touch."""
    contract = load_contract(ROOT / "loadtests" / "contracts" / "demo.toml")
    assert judge(contract, make_run(contract)).exit_code == 0
    verdict = judge(contract, freeze_of_2_s(contract))
    assert broken(verdict) == []
    assert {name for name, status in statuses(verdict).items() if status == "FAIL"} == {"freeze"}
    assert verdict.exit_code == 1
    assert any("freeze: 1 of 93 requests missed at most 1900 ms (1 late); no request may" in r for r in verdict.reasons)


@pytest.mark.parametrize(("change", "status"), [(lambda r: r, "PASS"), (lambda r: delayed(r, 400), "FAIL")])
def test_every_means_every(document, change, status):
    document["profiles"][0]["objectives"] = [{"id": "ttft", "metric": "ttft_ms", "quantile": 1.0, "le": 300}]
    contract = parse_contract(document)
    verdict = judge(contract, make_run(contract, lambda r: change(r) if r.index == 50 else r))
    assert (statuses(verdict), verdict.status) == ({"ttft": status}, status)
    errors = judge(contract, make_run(contract, lambda r: failing(r) if r.index == 50 else r))
    assert errors.status == "FAIL"


def test_every_needs_a_sample_too(document):
    """Wrong: ten requests without a freeze would pass for a proof."""
    document["profiles"][0]["objectives"] = [{"id": "ttft", "metric": "ttft_ms", "quantile": 1.0, "le": 300}]
    document["profiles"][0]["arrivals"]["phases"][1]["seconds"] = 1.0
    contract = parse_contract(document)
    result = judge(contract, make_run(contract)).profiles[0].results[0]
    assert result.status == "INCONCLUSIVE"
    assert result.n + result.more_samples == 59


def of_restart(run, *, before, after):
    return change_part(run, server={"before": before, "after": after})


@pytest.mark.parametrize(
    ("code", "before", "after"),
    [
        ("INTERNAL", {"success": 40, "fail": 0}, {"success": 9, "fail": 0}),  # a counter runs backwards
        ("UNAVAILABLE", {"success": 1, "fail": 0}, {"success": 9, "fail": 0}),  # the new server has passed the old one
    ],
)
def test_a_crash_under_load_is_a_failure_not_an_invalid_measurement(contract, code, before, after):
    """Wrong: a service that crashes would be excused, because it was started again and its counts are gone."""
    run = make_run(contract, lambda r: replace(failing(r), code=code) if r.index % 3 else r)
    verdict = judge(contract, of_restart(run, before=before, after=after))
    assert broken(verdict) == []
    assert (verdict.status, verdict.exit_code) == ("FAIL", 1)
    assert any("the server restarted" in check.text for check in verdict.profiles[0].checks)


def test_too_few_counts_without_a_crash_that_clients_saw_stay_invalid(contract):
    few = {"before": {"success": 1, "fail": 0}, "after": {"success": 9, "fail": 0}}
    for run in (make_run(contract), make_run(contract, lambda r: failing(r) if r.index == 50 else r)):
        assert broken(judge(contract, of_restart(run, **few))) == ["counters"]

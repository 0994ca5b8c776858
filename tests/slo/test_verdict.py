"""The verdict as a pure function: what proves a service, what fails it, and what is no measurement at all."""

from dataclasses import replace

import pytest
from slo_support import MS, SECOND, broken, change_part, delayed, failing, make_run, statuses

from loadtests.contract_toml import parse_contract
from loadtests.records import CENSORED, ERROR, NOT_ISSUED, SHED, TIMEOUT
from loadtests.verdict import judge


def test_an_honest_run_passes(contract):
    verdict = judge(contract, make_run(contract))
    assert broken(verdict) == []
    assert set(statuses(verdict).values()) == {"PASS"}
    assert (verdict.status, verdict.exit_code, verdict.reasons) == ("PASS", 0, ())


def test_an_empty_run_is_invalid(contract):
    """Wrong: no requests, no misses, therefore passed."""
    run = make_run(contract)
    for empty in (
        change_part(run, shards=(), records=(), server=None),
        change_part(run, records=()),
        replace(run, profiles=()),
    ):
        verdict = judge(contract, empty)
        assert (verdict.status, verdict.exit_code) == ("INVALID", 3)


def test_a_frozen_server_fails_with_a_long_tail(contract):
    """A freeze of 2 s is charged to every request that was due in it, because latency counts from the schedule."""
    start, end = round(1.0 * SECOND), round(3.0 * SECOND)

    def freeze(record):
        first = record.chunks[0][0]
        return delayed(record, (end - first) // MS) if start <= first < end else record

    verdict = judge(contract, make_run(contract, freeze))
    assert (verdict.status, verdict.exit_code) == ("FAIL", 1)
    result = verdict.profiles[0].results[0]
    assert result.status == "FAIL"
    assert result.value > 1500


@pytest.mark.parametrize("status", [ERROR, TIMEOUT, SHED, CENSORED])
def test_requests_that_do_not_end_ok_are_misses_of_every_promise(contract, status):
    """Wrong: a service could meet its latency by failing the slow ones."""
    verdict = judge(contract, make_run(contract, lambda r: failing(r, status) if r.index % 4 == 0 else r))
    assert broken(verdict) == []
    assert verdict.exit_code == 1
    found = statuses(verdict)
    assert [found[name] for name in ("ttft", "tpot", "stall", "e2e", "errors", "goodput")] == ["FAIL"] * 6
    result = verdict.profiles[0].results[0]
    assert result.misses == {
        status: sum(r.index % 4 == 0 and r.measured for r in make_run(contract).profiles[0].records)
    }
    assert result.value is None  # the p95 lies among requests that never ended ok: unbounded, not the best of the rest


def test_few_misses_are_undecided_and_say_what_is_missing(contract):
    verdict = judge(contract, make_run(contract, lambda r: failing(r) if r.index in (20, 40, 60) else r))
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 4)
    result = verdict.profiles[0].results[0]
    assert result.n + result.more_samples == 153
    assert f"{result.more_samples} more requests" in verdict.reasons[0]


TIGHTER = {
    "ttft": ("le", 3.0, {"ttft", "goodput"}),
    "tpot": ("le", 0.5, {"tpot", "goodput"}),
    "stall": ("le", 0.5, {"stall", "goodput"}),
    "e2e": ("le", 5.0, {"e2e", "goodput"}),
    "rate": ("ge", 10_000.0, {"rate"}),
}


@pytest.mark.parametrize("name", TIGHTER)
def test_a_tightened_limit_flips_its_objective_and_no_other(document, name):
    """Wrong: a limit would not be looked at, or one metric be judged by another's limit. (Goodput is all of them.)"""
    bound, value, flipped = TIGHTER[name]
    objective = next(o for o in document["profiles"][0]["objectives"] if o["id"] == name)
    objective[bound] = value
    contract = parse_contract(document)
    found = statuses(judge(contract, make_run(contract)))
    assert {key for key, status in found.items() if status == "FAIL"} == flipped
    assert {key for key, status in found.items() if status == "PASS"} == set(found) - flipped


@pytest.mark.parametrize(("name", "change"), [("errors", {"le": 0.05}), ("goodput", {"ge": 0.9})])
def test_ratios_flip_alone_too(document, name, change):
    """One in three requests fails: loosened to 60% the ratio passes, at its own limit it fails."""
    document["profiles"][0]["objectives"] = [{"id": name, "metric": "error_ratio", "le": 0.4}]
    if name == "goodput":
        document["profiles"][0]["objectives"] = [{"id": name, "metric": "compliance_ratio", "ge": 0.55}]
    loose = parse_contract(document)
    change_record = lambda r: failing(r) if r.index % 4 == 0 else r  # noqa: E731
    assert statuses(judge(loose, make_run(loose, change_record)))[name] == "PASS"
    document["profiles"][0]["objectives"][0].update(change)
    tight = parse_contract(document)
    assert statuses(judge(tight, make_run(tight, change_record)))[name] == "FAIL"


def told(**changes):
    return lambda record: replace(record, statistics={**record.statistics, **changes})


def shard(**changes):
    return lambda run: {"shards": (replace(run.shards[0], **changes),)}


def records(change):
    return lambda run: {"records": (*run.records[:-1], *change(run.records))}


def counted(before, after):
    return lambda run: {"server": {"before": {"success": before}, "after": {"success": after}}}


BROKEN_RECORDS = {
    "a request is missing": ("workers", records(lambda rs: ())),
    "a request is recorded twice": ("schedule", records(lambda rs: rs[:1])),
    "a request of no slot": ("schedule", records(lambda rs: [replace(rs[-1], index=999)])),
    "another time than the slot's": ("schedule", records(lambda rs: [replace(rs[-1], scheduled_ns=1)])),
    "another schedule": ("schedule", shard(schedule_sha256="x")),
    "a lost worker": ("workers", shard(of=2)),
    "no end line": ("workers", lambda run: {"shards": ()}),
    "stopped early": ("workers", shard(finished=False)),
    "a busy client": ("client_cpu", shard(cpu_ns=9 * SECOND)),
    "a client that woke up late": ("lag", shard(lag_ns=(400 * MS,) * 9)),
    "requests nobody recorded": ("in_flight", shard(in_flight=((0, 9), (SECOND, 9)))),
    "somebody else's requests": ("counters", counted(0, 900)),
    "a server that restarted": ("counters", counted(900, 3)),
}


@pytest.mark.parametrize("case", BROKEN_RECORDS)
def test_a_broken_measurement_is_invalid(contract, case):
    """Wrong: numbers that mean nothing would be called a pass, or a failure of the service."""
    name, changes = BROKEN_RECORDS[case]
    run = make_run(contract)
    verdict = judge(contract, change_part(run, **changes(run.profiles[0])))
    assert name in broken(verdict)
    assert (verdict.status, verdict.exit_code) == ("INVALID", 3)
    assert any(reason.startswith(f"small: {name}: ") for reason in verdict.reasons)


def test_one_late_request_in_a_hundred_is_the_machines(contract):
    """Its lateness counts as latency, so it cannot help the service; a second one makes the client suspect."""

    def late(*indices):
        return lambda r: replace(delayed(r, 260), sent_ns=r.sent_ns + 260 * MS) if r.index in indices else r

    assert "lag" not in broken(judge(contract, make_run(contract, late(40))))
    assert "lag" in broken(judge(contract, make_run(contract, late(40, 60))))


BROKEN_REQUESTS = {
    "sent late": ("lag", lambda r: replace(delayed(r, 300), sent_ns=r.sent_ns + 300 * MS)),
    "sent early": ("records", lambda r: replace(r, sent_ns=r.sent_ns - 5 * MS)),
    "times run backwards": ("records", lambda r: replace(r, chunks=r.chunks[::-1])),
    "ok without all tokens": ("records", lambda r: replace(r, chunks=r.chunks[:-1])),
    "not issued": ("max_in_flight", lambda r: replace(failing(r, NOT_ISSUED), sent_ns=None) if r.index == 9 else r),
    "output tokens lie": ("output_tokens", told(completion_tokens=60)),
    "prompt tokens lie": ("prompt_tokens", told(prompt_tokens=1)),
    "phases exceed what was seen": ("phases", told(prefill_us=10_000_000)),
    "decode exceeds what was seen": ("phases", told(decode_us=10_000_000)),
    "negative phases": ("phases", told(queue_us=-1)),
    "answers from the prefix cache": ("prefix_cache", told(cached_tokens=8)),
    "no statistics": ("statistics", lambda r: replace(r, statistics=None)),
    "two model versions": ("model_version", lambda r: replace(r, model_version="2") if r.index % 2 else r),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_REQUESTS)
def test_records_that_cannot_be_are_invalid(contract, case):
    name, change = BROKEN_REQUESTS[case]
    verdict = judge(contract, make_run(contract, change))
    assert name in broken(verdict)
    assert verdict.exit_code == 3


@pytest.mark.parametrize(("expect", "found"), [("abc", "abd"), ("abc", None)])
def test_another_release_than_expected_is_invalid(document, expect, found):
    """Wrong: a verdict on one release would be read as one on another; an unknown identity is not a match."""
    document["target"]["expect"] = {"release_digest": expect}
    contract = parse_contract(document)
    run = make_run(contract)
    verdict = judge(contract, replace(run, header={**run.header, "identity": {"given_release_digest": found}}))
    assert verdict.exit_code == 3
    [reason] = [reason for reason in verdict.reasons if reason.startswith("release_digest of the folder given")]
    assert reason.endswith(f"(the server tells none) is {found}, the contract says abc")
    verdict = judge(contract, replace(run, header={**run.header, "identity": {"given_release_digest": "abc"}}))
    assert verdict.exit_code == 0


def test_a_server_that_serves_another_release_than_the_folder_given_is_invalid(document):
    """Wrong: the report would show the manifest of one release over the figures of another."""
    contract = parse_contract(document)
    run = make_run(contract)
    identity = {"release_digest": "abc", "given_release_digest": "abd"}
    verdict = judge(contract, replace(run, header={**run.header, "identity": identity}))
    assert verdict.exit_code == 3
    assert verdict.reasons == ("the server serves abc, the folder given holds abd",)
    verdict = judge(contract, replace(run, header={**run.header, "identity": {"release_digest": "abc"}}))
    assert verdict.exit_code == 0


def test_a_server_that_only_fails_is_failed_also_when_its_version_is_unknown(document):
    document["target"]["expect"] = {"model_version": "1"}
    contract = parse_contract(document)
    run = make_run(contract, lambda r: replace(failing(r), model_version=None))
    assert judge(contract, run).exit_code == 1


def test_records_of_another_contract_are_invalid(contract, document):
    document["profiles"][0]["objectives"][0]["le"] = 9000
    assert judge(parse_contract(document), make_run(contract)).exit_code == 3


def test_answers_in_one_response_cannot_prove_tpot(contract):
    """Holding everything back leaves no interval: TPOT has no value, which is not 0 ms and not a pass."""
    verdict = judge(contract, make_run(contract, lambda r: replace(r, chunks=((r.chunks[-1][0], 6),))))
    assert statuses(verdict)["tpot"] == "INVALID"
    assert verdict.exit_code == 3
    late = judge(
        contract, make_run(contract, lambda r: replace(delayed(r, 400), chunks=((r.chunks[-1][0] + 400 * MS, 6),)))
    )
    assert late.exit_code == 1


def test_the_same_records_give_the_same_verdict(contract):
    run = make_run(contract, lambda r: failing(r) if r.index % 9 == 0 else r)
    assert judge(contract, run) == judge(contract, run)

"""Campaigns that cannot be fooled: ways to a PASS that is not deserved, and to a FAIL that is the client's own."""

import functools
import json
import resource
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from slo_campaigns import document_with, run_campaign
from slo_stub import Behaviour
from slo_support import MS, SECOND, broken, change_part, delayed, failing, make_run, statuses, to_toml
from test_records import write_shards

from loadtests import campaign
from loadtests.contract_toml import parse_contract
from loadtests.exits import exit_code_of
from loadtests.raw_files import read_run
from loadtests.records import CANCELLED
from loadtests.runs import Run
from loadtests.verdict import judge
from tritonforge.errors import InvalidRequest

SLOW = (20, 60)
"""Two late requests of about a hundred: p95 is then undecided. Whoever hides them would have a PASS."""


def one_promise(document, metric, le, **measurement):
    document["profiles"][0]["objectives"] = [{"id": "o", "metric": metric, "quantile": 0.95, "le": le}]
    document["measurement"] |= measurement
    return parse_contract(document)


def result_of(contract, change):
    verdict = judge(contract, make_run(contract, lambda r: change(r) if r.index in SLOW else r))
    return verdict.profiles[0].results[0]


def slow_decode(record):
    times = [record.chunks[0][0] + k * 200 * MS for k in range(len(record.chunks))]
    statistics = {**record.statistics, "decode_us": 200_000 * (len(times) - 1)}
    return replace(record, chunks=tuple((at, 1) for at in times), end_ns=times[-1] + MS, statistics=statistics)


def in_one_response(record):
    return replace(record, chunks=((record.chunks[-1][0], record.received_tokens),))


def without_account(record):
    return replace(record, statistics=None)


HIDDEN = {
    "queue times that the server does not tell": ("queue_ms", 50, lambda r: delayed(r, 200), without_account),
    "slow tokens handed over all at once": ("tpot_ms", 100, slow_decode, in_one_response),
    "a stall handed over with all the rest": ("max_stall_ms", 100, slow_decode, in_one_response),
    "decode steps that the server does not tell": ("decode_step_ms", 100, slow_decode, without_account),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_what_cannot_be_seen_is_no_pass(document, case):
    """Wrong: a value that is left out would leave the sample, and a server could leave out its worst ones."""
    metric, le, slow, hide = HIDDEN[case]
    contract = one_promise(document, metric, le, statistics_matched_min=0.9)
    assert result_of(contract, lambda r: r).status == "PASS"
    seen, hidden = result_of(contract, slow), result_of(contract, lambda r: hide(slow(r)))
    assert (seen.status, hidden.status) == ("INCONCLUSIVE", "INCONCLUSIVE")
    assert hidden.misses == {"unknown": 2}
    assert hidden.n == seen.n


def test_goodput_counts_no_answer_whose_promises_cannot_be_seen(document):
    objectives = document["profiles"][0]["objectives"]
    document["profiles"][0]["objectives"] = [o for o in objectives if o["id"] in ("tpot", "goodput")]
    document["profiles"][0]["objectives"][1]["ge"] = 0.95
    contract = parse_contract(document)
    run = make_run(contract, lambda r: in_one_response(r) if r.index in SLOW else r)
    assert statuses(judge(contract, run)) == {"tpot": "INCONCLUSIVE", "goodput": "INCONCLUSIVE"}


def test_what_cannot_be_seen_is_no_failure_either(document):
    """Wrong: a service whose answers are short enough for one response would break promises that it keeps."""
    contract = one_promise(document, "tpot_ms", 100, single_token_max=0.5)
    run = make_run(contract, lambda r: in_one_response(r) if r.index % 3 == 0 else r)
    assert statuses(judge(contract, run)) == {"o": "INCONCLUSIVE"}
    document["profiles"][0]["objectives"][0]["quantile"] = 1.0
    contract = parse_contract(document)
    assert statuses(judge(contract, make_run(contract, in_one_response)))["o"] == "INVALID"
    run = make_run(contract, lambda r: in_one_response(r) if r.index == 40 else r)
    assert statuses(judge(contract, run)) == {"o": "INCONCLUSIVE"}
    run = make_run(contract, lambda r: in_one_response(r) if r.index == 40 else slow_decode(r) if r.index == 60 else r)
    assert statuses(judge(contract, run)) == {"o": "FAIL"}


def test_a_single_token_has_no_interval_by_definition(document):
    document["profiles"][0]["output_tokens"] = {"dist": "constant", "value": 6}
    contract = one_promise(document, "tpot_ms", 100, single_token_max=1)

    def single(record):
        statistics = {**record.statistics, "completion_tokens": 1}
        return replace(record, chunks=record.chunks[:1], item="x", statistics=statistics)

    found = judge(contract, make_run(contract, lambda r: single(r) if r.index in SLOW else r)).profiles[0].results[0]
    assert (found.not_applicable, found.misses) == (2, {})


def relabelled(record):
    return replace(record, status=CANCELLED, cancel_ns=record.sent_ns + MS, finish_reason="cancelled")


UNPLANNED = {
    "late requests called cancelled on purpose": relabelled,
    "a cancel that the schedule does not know": lambda r: replace(r, cancel_ns=r.sent_ns + MS),
    "a retry in a profile without retries": lambda r: replace(r, attempts=((r.sent_ns, r.sent_ns, "shed"),)),
}


@pytest.mark.parametrize("case", UNPLANNED)
def test_a_request_may_only_do_what_its_profile_says(contract, case):
    """Wrong: requests that were cancelled on purpose count for no other promise, so anything could be called that."""
    verdict = judge(contract, make_run(contract, lambda r: UNPLANNED[case](r) if r.index in SLOW else r))
    assert broken(verdict) == ["schedule"]


ODD = {
    "responses without tokens": ("records", {"records"}, lambda r: replace(r, chunks=((r.chunks[0][0], 1),) * 2)),
    "a response of no token": ("records", {"records"}, lambda r: replace(r, chunks=(r.chunks[0], (r.end_ns, 0)))),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_records_are_told_and_crash_nothing(contract, case):
    name, _, change = ODD[case]
    assert name in broken(judge(contract, make_run(contract, lambda r: change(r) if r.index == 40 else r)))


def test_a_client_that_stood_still_is_not_the_services_stall(contract):
    """Wrong: one freeze of the machine that measures has few timers to tell of it, and fails the service.

    Every answer that was open meanwhile seems to stall.
    """

    def stalled(record):
        at = record.chunks[2][0] + 900 * MS
        chunks = (*record.chunks[:2], *((at + k * MS, 1) for k in range(len(record.chunks) - 2)))
        return replace(record, chunks=chunks, end_ns=chunks[-1][0] + MS)

    run = make_run(contract, lambda r: stalled(r) if 30 <= r.index < 50 else r)
    lags = (*(MS,) * 500, 900 * MS)
    shard = replace(run.profiles[0].shards[0], lag_ns=lags, in_flight=())
    verdict = judge(contract, change_part(run, shards=(shard,)))
    assert broken(verdict) == ["lag"]
    assert verdict.exit_code == 3
    honest = judge(contract, change_part(run, shards=(replace(shard, lag_ns=lags[:-1]),)))
    assert honest.exit_code == 1


def test_workers_that_start_apart_send_another_load(contract):
    """Wrong: the second half of the load could come when the first one is over."""
    run = make_run(contract)
    [whole] = run.profiles[0].shards
    records = tuple(replace(r, shard=r.index % 2) for r in run.profiles[0].records)
    counts = [sum(r.shard == k for r in records) for k in range(2)]
    shards = [replace(whole, shard=k, of=2, requests=counts[k], in_flight=()) for k in range(2)]
    together = change_part(run, records=records, shards=tuple(shards))
    assert judge(contract, together).exit_code == 0
    apart = change_part(run, records=records, shards=(shards[0], replace(shards[1], start_late_ns=3 * SECOND)))
    assert broken(judge(contract, apart)) == ["start"]


def test_records_of_another_run_or_contract_are_not_this_runs(contract):
    """Wrong: two campaigns into one folder, or a contract that is edited while it is walked, would be mixed."""
    run = make_run(contract, lambda r: replace(r, request_id=f"s-small-{r.index}") if r.index == 40 else r)
    assert judge(contract, run).reasons == ("1 records are not of run r, the first is s-small-40",)
    run = make_run(contract)
    shard = replace(run.profiles[0].shards[0], contract_sha256="abc")
    verdict = judge(contract, change_part(run, shards=(shard,)))
    assert verdict.reasons == ("small: a worker read another contract, sha256 abc",)
    assert verdict.exit_code == 3


@pytest.mark.parametrize("sides", [{"before": "a", "after": "b"}, {"before": "b", "after": "b"}, {"after": "b"}])
def test_a_release_that_changes_in_mid_run_is_invalid(contract, sides):
    """Wrong: a verdict on one release would rest on requests that another one answered."""
    run = make_run(contract)
    server = {**run.profiles[0].server, "release": sides}
    told = {**run.header, "identity": {"release_digest": "a"}}
    changed = replace(change_part(run, server=server), header=told)
    assert judge(contract, changed).exit_code == 3
    same = change_part(run, server={**server, "release": {"before": "a", "after": "a"}})
    assert judge(contract, replace(same, header=told)).exit_code == 0


def edited(old: str, new: str):
    return lambda lines: [line.replace(old, new, 1) for line in lines]


EDITS = {
    "a time made shorter": edited('"sent_ns":5', '"sent_ns":4'),
    "a status": edited('"status":"error"', '"status":"ok"'),
    "the contract's sha256": edited('"contract_sha256":"', '"contract_sha256":"0'),
    "the counters left out": lambda lines: [line for line in lines if '"kind":"server"' not in line],
    "the end left out": lambda lines: lines[:-1],
    "a line added": lambda lines: [*lines, lines[-2]],
    "two lines exchanged": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
}


@pytest.mark.parametrize("case", EDITS)
def test_records_that_were_changed_after_the_run_are_invalid(contract, tmp_path, case):
    """Wrong: a hand could improve the records between campaign and recompute, or a copy lose its end, unseen."""
    raw = write_shards(tmp_path, contract, make_run(contract, lambda r: failing(r) if r.index == 40 else r))
    assert judge(contract, read_run(raw)).identity[-1].ok
    before = raw.read_text()
    raw.write_text("\n".join(EDITS[case](before.splitlines())) + "\n")
    assert raw.read_text() != before
    verdict = judge(contract, read_run(raw))
    assert verdict.exit_code == 3
    assert any("were changed, cut short or added to" in reason for reason in verdict.reasons)


def prepared(tmp_path: Path, tokenizer: Path, document) -> Run:
    contract = tmp_path / "given.toml"
    contract.write_text(to_toml(document))
    return Run.prepare(contract=contract, out=tmp_path / "out", url="127.0.0.1:9", tokenizer=tokenizer)


def test_two_campaigns_do_not_write_into_one_folder(tmp_path, tokenizer, document):
    """Wrong: the second would remove the records of the first under its hands."""
    first, second = prepared(tmp_path, tokenizer, document), prepared(tmp_path, tokenizer, document)
    first.create_folder()
    mark = tmp_path / "out" / "raw" / "small.0.jsonl"
    mark.write_text("")
    with pytest.raises(InvalidRequest, match="no other campaign writes into"):
        second.create_folder()
    assert mark.exists()
    first.conclude({})
    second.create_folder()
    assert not mark.exists()


def test_a_disk_that_is_full_is_no_verdict_and_no_hang(tmp_path, tokenizer, monkeypatch):
    """Wrong: lost records would be a service's failure, or the load process would wait for ever for its walk."""
    popen = functools.partial(
        subprocess.Popen, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9000,) * 2)
    )
    monkeypatch.setattr(campaign, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))
    outcome = run_campaign(tmp_path, tokenizer, Behaviour(), document_with(seconds=2.0, rate=60.0))
    assert outcome.exit_code == 3
    assert "workers" in outcome.broken()


def test_a_report_that_cannot_be_kept_is_no_usage_error(tmp_path, tokenizer, document):
    run = prepared(tmp_path, tokenizer, document)
    run.create_folder()
    (run.out / "raw.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as lost:
        run.conclude({})
    assert exit_code_of(lost.value) == 3


def test_shards_that_are_none_are_no_records(contract, tmp_path):
    raw = write_shards(tmp_path, contract, make_run(contract))
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    [end] = [line for line in lines if line["kind"] == "shard_end"]
    end["cpu_ns"] = None
    raw.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InvalidRequest, match="counts and times of a shard must be integers"):
        read_run(raw)

"""What a profile's load does, seen from the server: tenants, cancels, slow readers, retries, HTTP, quality sets.

Whole campaigns through Locust against a stub, each with a contract of its own.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest
from slo_campaigns import CAMPAIGN, ENVIRONMENT, arguments, document_with, run_campaign
from slo_stub import Behaviour, Stub
from slo_support import to_toml

from loadtests import metrics
from loadtests.campaign import main
from loadtests.raw_files import read_run
from loadtests.records import CANCELLED, OK, SHED

PRICE = {"cost": {"per_hour": 1.0, "currency": "USD"}}


def promising(*objectives: dict, **profile) -> dict:
    named = [{"id": f"o{k}", **objective} for k, objective in enumerate(objectives)]
    return document_with(objectives=named, **profile)


GOOD = {"metric": "error_ratio", "le": 0.05}
HUNG = {"metric": "hung_requests", "le": 0}
TENANTS = [{"id": "gold", "share": 0.5, "priority_class": 1}, {"id": "bulk", "share": 0.5}]
PATIENT = {"drain_s": 6.0, "idle_gap_s": 5.0, "deadline_s": 8.0}
IMPATIENT = [{"id": "t", "cancel": {"share": 0.5, "after_ms": [0], "after_tokens": [2, 4]}}]
SLOW = [{"id": "normal", "share": 0.8}, {"id": "slow", "share": 0.2, "slow": {"after_tokens": 2, "pause_s": 1.5}}]
LONG = {"dist": "constant", "value": 40}
QUALITY = [
    {"id": "a", "prompt": "what is a", "max_tokens": 9, "check": "exact", "expect": ["what is a"]},
    {"id": "b", "prompt": "b please", "max_tokens": 9, "check": "contains", "expect": ["b PLEASE"]},
]


def quality(*objectives: dict) -> dict:
    document = promising(*objectives, data={"source": "quality", "seed": 1}, quality=QUALITY)
    del document["profiles"][0]["prompt_tokens"], document["profiles"][0]["output_tokens"]
    return document


@dataclass
class Case:
    """A load and a server, and the exit code that the campaign must end with."""

    document: dict
    behaviour: Behaviour
    exit_code: int = 0


RELEASED = {"metric": "cancel_to_end_ms", "quantile": 0.5, "le": 250}
TRIES = {"metric": "attempts_per_request", "le": 1.6}
CASES = {
    "tenants": Case(promising(GOOD, tenants=TENANTS, options={"temperature": 0.5}), Behaviour()),
    "cancels": Case(promising(RELEASED, GOOD, tenants=IMPATIENT, output_tokens=LONG, seconds=4), Behaviour()),
    "cancels that take long": Case(
        promising(RELEASED, tenants=IMPATIENT, output_tokens=LONG, rate=20.0, seconds=4),
        Behaviour(cancel_takes_s=0.8, gap_s=0.03),
        1,
    ),
    "slow readers": Case(
        promising(GOOD, HUNG, tenants=SLOW, output_tokens=LONG, client=PATIENT), Behaviour(gap_s=0.002)
    ),
    "retries": Case(
        promising(GOOD, TRIES, retry={"max_attempts": 4, "base_ms": 50}), Behaviour(refuse_first=True, every=4)
    ),
    "refusals without retries": Case(promising(GOOD), Behaviour(refuse_first=True, every=4), 1),
    "http": Case(promising(GOOD, HUNG, protocol="http-sse"), Behaviour()),
    "http in-band errors": Case(promising(GOOD, protocol="http-sse"), Behaviour(fail_in_band_at=2, every=3), 1),
    "http truncated": Case(promising(GOOD, protocol="http-sse"), Behaviour(no_final=True, every=3), 1),
    "right answers": Case(quality({"metric": "quality_ratio", "ge": 0.9}), Behaviour(answer=lambda prompt: prompt)),
    "wrong answers": Case(quality({"metric": "quality_ratio", "ge": 0.9}), Behaviour(answer=lambda prompt: "no"), 1),
    "batch": Case(
        promising(
            {"metric": "output_tokens_per_s", "ge": 100},
            {"metric": "cost_per_million_output_tokens", "le": 50},
            output_tokens=LONG,
            client=PATIENT,
            arrivals={"process": "batch", "seed": 1, "phases": [{"name": "all", "count": 60, "seconds": 1}]},
        )
        | PRICE,
        Behaviour(gap_s=0.05),
    ),
}


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory, tokenizer):
    """Campaigns of the selected cases, three at a time; each test waits for its own."""
    wanted = [name for name in CASES if any(name in item.name for item in request.session.items)] or list(CASES)
    folder = tmp_path_factory.mktemp("loads")
    with ThreadPoolExecutor(3) as pool:
        yield {
            name: pool.submit(
                run_campaign, folder / name.replace(" ", "-"), tokenizer, CASES[name].behaviour, CASES[name].document
            )
            for name in wanted
        }


def records_of(outcome):
    return [record for record in read_run(outcome.folder / "raw.jsonl").profiles[0].records if record.measured]


@pytest.mark.parametrize("case", CASES)
def test_a_load_gets_its_verdict_and_leaves_nothing_open(case, outcomes):
    outcome = outcomes[case].result()
    assert outcome.exit_code == CASES[case].exit_code, outcome.report["verdict"]
    assert outcome.broken() == set(), outcome.report["verdict"]
    assert outcome.stub.open == 0
    CHECKS.get(case, lambda outcome: None)(outcome)


def options_travel(outcome):
    seen = [parameters for parameters in outcome.stub.parameters if "tenant" in parameters]
    assert len(seen) == len(outcome.stub.parameters)
    assert {(p["tenant"], p.get("priority_class")) for p in seen} == {("gold", 1), ("bulk", None)}


def cancels_are_records(outcome):
    found = records_of(outcome)
    cancelled = [record for record in found if record.status == CANCELLED]
    assert len(cancelled) >= 20
    assert all(record.finish_reason == "cancelled" and record.statistics for record in cancelled)
    assert {record.status for record in found} == {CANCELLED, OK}
    asked = {record.request_id for record in found if record.cancel_ns is not None}
    assert asked <= set(outcome.stub.cancelled_ids)


def slow_ones_pause_and_the_others_do_not(outcome):
    stalls = {"normal": [], "slow": []}
    for record in records_of(outcome):
        stalls[record.tenant].append(metrics.max_stall_ns(record) / 1e9)
    assert min(stalls["slow"]) >= 1.4
    assert sorted(stalls["normal"])[len(stalls["normal"]) // 2] < 0.5


def retries_are_one_request_each(outcome):
    found = records_of(outcome)
    retried = [record for record in found if record.attempts]
    assert retried
    assert {status for record in retried for _, _, status in record.attempts} == {SHED}
    assert {record.status for record in found} == {OK}


def http_has_the_same_options(outcome):
    body = outcome.stub.http_bodies[-1]
    assert (body["stream"], body["ignore_eos"], body["max_tokens"]) == (True, True, 6)
    assert all(len(record.chunks) == 6 for record in records_of(outcome))


CHECKS = {
    "tenants": options_travel,
    "cancels": cancels_are_records,
    "slow readers": slow_ones_pause_and_the_others_do_not,
    "retries": retries_are_one_request_each,
    "http": http_has_the_same_options,
}


def test_a_client_that_is_starved_of_cpu_measures_nothing(tmp_path, tokenizer):
    """Wrong: the pauses of the load generator would be charged to the service."""
    document = document_with(seconds=4.0)
    document["measurement"]["schedule_lag_p99_ms"] = 400
    contract = tmp_path / "given.toml"
    contract.write_text(to_toml(document))
    with Stub() as stub:
        command = [sys.executable, CAMPAIGN, *arguments(contract, tokenizer, tmp_path), "--url", stub.url]
        process = subprocess.Popen(command, env=ENVIRONMENT)
        deadline = time.monotonic() + 30
        while stub.seen < 30 and time.monotonic() < deadline:
            time.sleep(0.02)
        (load,) = psutil.Process(process.pid).children()
        os.kill(load.pid, signal.SIGSTOP)
        time.sleep(1.0)  # this is the starvation itself
        os.kill(load.pid, signal.SIGCONT)
        assert process.wait(timeout=40) == 3
    assert '"lag"' in (tmp_path / "report.json").read_text()


def test_an_empty_schedule_is_refused_before_the_load(tmp_path, tokenizer, capsys):
    contract = tmp_path / "given.toml"
    contract.write_text(to_toml(document_with(rate=0.001, seconds=0.5)))
    with Stub() as stub:
        assert main([*arguments(contract, tokenizer, tmp_path), "--url", stub.url]) == 2
        assert stub.seen == 0
    assert "its schedule has 0" in capsys.readouterr().err


def test_what_a_profile_needs_of_the_server_is_asked_for_before_the_load(tmp_path, tokenizer, capsys):
    contract = tmp_path / "given.toml"
    contract.write_text(to_toml(promising(HUNG, fault={"action": "kill_worker", "at_s": 1.0})))
    with Stub() as stub:
        assert main([*arguments(contract, tokenizer, tmp_path), "--url", stub.url]) == 2
        assert "give --server-pid" in capsys.readouterr().err
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
            given = ["--url", stub.url, "--server-pid", str(other.pid)]
            code = main([*arguments(contract, tokenizer, tmp_path), *given])
            other.kill()
        assert stub.seen == 0
    assert code == 2
    assert "server's with a decoder below it" in capsys.readouterr().err

"""Whole campaigns through Locust, against servers of known truth, liars and broken ones: each its verdict.

The load runs in processes of its own, as in production; only the server is a stub.
"""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from slo_campaigns import CAMPAIGN, ENVIRONMENT, arguments, document_with, run_campaign
from slo_stub import Behaviour, Stub
from slo_support import DOCUMENT, ROOT, to_toml

from loadtests import metrics
from loadtests.campaign import main
from loadtests.raw_files import read_run


@dataclass
class Case:
    """A server with a fault, and the verdict it must get: exit code, objectives that FAIL, checks that break."""

    behaviour: Behaviour
    exit_code: int
    fails: set[str] = field(default_factory=set)
    breaks: set[str] = field(default_factory=set)
    counts: set[str] = field(default_factory=set)
    document: dict = field(default_factory=document_with)


def lying(**changes) -> Behaviour:
    return Behaviour(lie=lambda statistics: statistics | changes)


def expecting(version: str) -> dict:
    document = document_with()
    document["target"]["expect"] = {"model_version": version}
    return document


def limiting(**measurement: float) -> dict:
    document = document_with()
    document["measurement"] |= measurement
    return document


def demo_promises(**load) -> dict:
    """The demo's objectives on a shorter, denser load with answers of its lengths."""
    demo = tomllib.loads((ROOT / "loadtests" / "contracts" / "demo.toml").read_text())["profiles"][0]
    wanted = {key: demo[key] for key in ("output_tokens", "client", "objectives")}
    return document_with(**wanted, **load)


EVERYTHING = {"ttft", "tpot", "stall", "e2e", "errors", "goodput"}
CASES = {
    "all errors": Case(Behaviour(fail_in_band_at=0), 1, EVERYTHING, counts={"error"}),
    "in-band error after tokens": Case(Behaviour(fail_in_band_at=3, every=4), 1, EVERYTHING, counts={"error"}),
    "refused as overloaded": Case(
        Behaviour(fail_in_band_at=0, fail_message="UNAVAILABLE: the queue is full", every=4),
        1,
        EVERYTHING,
        counts={"shed"},
    ),
    "a quarter hangs": Case(Behaviour(hang_at=3, every=4), 1, EVERYTHING, counts={"timeout"}),
    "a quarter hangs past the drain": Case(
        Behaviour(hang_at=3, every=4),
        1,
        EVERYTHING,
        counts={"censored"},
        document=document_with(client={"drain_s": 0.5, "idle_gap_s": 30.0, "deadline_s": 30.0}),
    ),
    "empty streams that end well": Case(Behaviour(no_responses=True, every=4), 1, EVERYTHING, counts={"error"}),
    "no final response": Case(Behaviour(no_final=True, every=4), 1, EVERYTHING, counts={"error"}),
    "answers cut short": Case(Behaviour(drop_tokens=2, every=4), 1, EVERYTHING, counts={"error"}),
    "one stall an answer": Case(Behaviour(stall_s=0.5, every=4), 1, {"stall", "goodput"}),
    "tokens held back": Case(Behaviour(one_response=True, gap_s=0.08), 1, {"ttft", "goodput"}),
    "frozen for 2 s": Case(
        Behaviour(freeze=(1.5, 2.0)),
        1,
        {"ttft", "goodput"},
        document=document_with(rate=20.0, seconds=6.0, client={"drain_s": 5.0, "idle_gap_s": 5.0, "deadline_s": 9.0}),
    ),
    "frozen for 2 s under the demo's promises": Case(
        Behaviour(freeze=(3.0, 2.0), gap_s=0.02),
        1,
        {"freeze"},
        document=demo_promises(rate=12.0, seconds=7.0),
    ),
    "token counts that lie": Case(lying(completion_tokens=9), 3, breaks={"output_tokens"}),
    "another tokenizer": Case(lying(prompt_tokens=99), 3, breaks={"prompt_tokens"}),
    "phases that lie": Case(lying(prefill_us=9_000_000), 3, breaks={"phases"}),
    "late requests dropped to look fast": Case(
        Behaviour(first_s=0.1, late_limit_s=0.3), 1, {"errors", "goodput"}, counts={"error"}
    ),
    "several tokens a response": Case(
        Behaviour(tokens_per_response=3), 3, breaks={"batch_ratio"}, document=limiting(batch_ratio_min=0.8)
    ),
    "another model version": Case(Behaviour(version="9"), 3, breaks={"model_version"}, document=expecting("1")),
}


@pytest.fixture(scope="session")
def outcomes(request, tmp_path_factory, tokenizer):
    """Campaigns of the selected cases, three at a time; each test waits for its own."""
    named = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = [params["case"] for params in named if params.get("case") in CASES]
    folder = tmp_path_factory.mktemp("cases")
    with ThreadPoolExecutor(3) as pool:
        yield {
            name: pool.submit(
                run_campaign, folder / name.replace(" ", "-"), tokenizer, CASES[name].behaviour, CASES[name].document
            )
            for name in names
        }


@pytest.mark.parametrize("case", CASES)
def test_liars_and_broken_servers_get_their_verdict(case, outcomes):
    expected, outcome = CASES[case], outcomes[case].result()
    assert outcome.exit_code == expected.exit_code, outcome.report["verdict"]
    assert outcome.broken() == expected.breaks, outcome.report["verdict"]
    failed = {row["id"] for row in outcome.profile["objectives"] if row["status"] == "FAIL"}
    assert failed >= expected.fails, outcome.report["verdict"]
    assert set(outcome.profile["counts"]) >= expected.counts
    assert (
        sum(n for status, n in outcome.profile["counts"].items() if status != "scheduled")
        == outcome.profile["counts"]["scheduled"]
    )
    assert outcome.stub.open == 0  # nothing keeps generating after the client has gone
    if case == "frozen for 2 s":
        records = read_run(outcome.folder / "raw.jsonl").profiles[0].records
        assert metrics.percentile_ns([metrics.ttft_ns(r) for r in records if r.measured], 0.99) > 1_500_000_000
    if case == "a quarter hangs":
        assert outcome.stub.cancelled_ids  # an ensemble hides a closed call from the decoder: it is told by request id


NEEDS_TOKENIZER = "INVALID_ARGUMENT: prompts need the tokenizer of what is served: give --release or --tokenizer\n"


def test_usage_and_set_up_errors_have_their_codes(tmp_path, capsys):
    contract = tmp_path / "c.toml"
    contract.write_text(to_toml(DOCUMENT))
    url = "127.0.0.1:9"

    def code(*given: str) -> tuple[int, str]:
        try:
            return main(list(given)), capsys.readouterr().err
        except SystemExit as stop:
            return stop.code, capsys.readouterr().err

    assert code()[0] == 2
    assert code("--contract", "none.toml")[0] == 2
    assert code("--contract", str(contract), "--url", url) == (2, NEEDS_TOKENIZER)
    assert code("--contract", str(contract), "--release", str(tmp_path / "nowhere"))[0] == 2
    assert code("--recompute", str(tmp_path / "none.jsonl"), "--contract", str(contract))[0] == 3
    assert code("--contract", str(contract), "--lint")[0] == 0
    contract.write_text(to_toml(DOCUMENT | {"surprise": 1}))
    assert code("--contract", str(contract)) == (2, "INVALID_ARGUMENT: surprise: unknown key\n")


def test_nobody_at_the_target(tmp_path, tokenizer, monkeypatch):
    from loadtests.target import Unreachable, inspect

    with pytest.raises(Unreachable, match="nothing answers at"):
        inspect("127.0.0.1:9", "llm", timeout_s=0.3)
    with Stub() as stub, pytest.raises(Unreachable, match=r"model other at .* is not ready"):
        inspect(stub.url, "other")


def test_an_interrupted_campaign_reports_what_it_has(tmp_path, tokenizer):
    """Ctrl-C: exit code 130, a report that says INVALID, no process and no stream left."""
    contract = tmp_path / "given.toml"
    contract.write_text(to_toml(document_with(seconds=30.0)))
    command = [sys.executable, CAMPAIGN, *arguments(contract, tokenizer, tmp_path)]
    with Stub() as stub:
        process = subprocess.Popen([*command, "--url", stub.url], env=ENVIRONMENT, start_new_session=True)
        deadline = time.monotonic() + 20
        while stub.seen < 30 and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == 130
        time.sleep(0.3)
        assert stub.open == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"]["status"] == "INVALID"
    assert report["profiles"][0]["counts"]["ok"] >= 20

"""A small campaign against the real server: tenants, cancels, slow readers, HTTP, a quality set, the server's gauges.

Nothing in it depends on how fast the machine is: outcomes, counts and what the server accounts for are asserted.
"""

import json

import pytest
from slo_support import ROOT, to_toml

from loadtests.campaign import main
from loadtests.documents import read_document
from loadtests.raw_files import read_run
from loadtests.records import CANCELLED, OK

pytestmark = pytest.mark.server

PROMPTS, ANSWERS = {"dist": "uniform", "min": 16, "max": 24}, {"dist": "uniform", "min": 48, "max": 64}
CLIENT = {"drain_s": 60.0, "idle_gap_s": 30.0, "deadline_s": 60.0}
TENANTS = [
    {"id": "plain", "share": 0.3, "priority_class": 3},
    {"id": "slow", "share": 0.2, "slow": {"after_tokens": 4, "pause_s": 1.0}},
    {"id": "impatient", "share": 0.5, "cancel": {"after_ms": [0], "after_tokens": [1, 4]}},
]
NONE_FAIL = {"id": "failed", "metric": "failed_requests", "le": 0, "max_true_rate": 0.5}


def profile(name: str, *objectives: dict, rate: float, seconds: float, **more) -> dict:
    phases = [{"name": "only", "rate": rate, "seconds": seconds}]
    arrivals = {"process": "constant", "seed": 1, "phases": phases}
    return {
        "id": name,
        "data": {"seed": 1},
        "client": CLIENT,
        "arrivals": arrivals,
        "objectives": [NONE_FAIL, *objectives],
        **({} if "quality" in more else {"prompt_tokens": PROMPTS, "output_tokens": ANSWERS}),
        **more,
    }


def document() -> dict:
    answers = read_document(ROOT / "loadtests" / "contracts" / "acceptance.toml")["profiles"][0]["quality"]
    leak = {"id": "leak", "metric": "kv_blocks_leaked", "le": 0}
    right = {"id": "right", "metric": "quality_ratio", "ge": 0.8}
    return {
        "schema": "tritonforge.contract/1",
        "name": "served",
        "revision": 1,
        "target": {"model": "llm"},
        "measurement": {"schedule_lag_p99_ms": 30_000, "residual_min_ms": -50, "in_flight_mismatch_max": 0.5},
        "profiles": [
            profile("mixed", leak, rate=10.0, seconds=3.0, tenants=TENANTS),
            profile("http", rate=5.0, seconds=2.0, protocol="http-sse"),
            profile("answers", right, rate=8.0, seconds=2.2, data={"source": "quality", "seed": 1}, quality=answers),
        ],
    }


def test_every_kind_of_load_is_carried_out_and_accounted_for(server, release_dir, tmp_path):
    contract = tmp_path / "given.toml"
    contract.write_text(to_toml(document()))
    command = ["--contract", contract, "--release", release_dir, "--out", tmp_path / "out", "--url", server.grpc_url]
    command += ["--http-url", server.http_url, "--metrics-url", server.metrics_url, "--server-pid", server.pid]
    code = main([str(word) for word in command])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert code == 0, report["verdict"]
    checks = {check["name"]: check["ok"] for check in report["profiles"][0]["checks"]}
    assert checks["engine_tokens"] is True
    assert checks["gauges"] is True
    mixed, http, answers = read_run(tmp_path / "out" / "raw.jsonl").profiles
    cancelled = [record for record in mixed.records if record.status == CANCELLED]
    assert len(cancelled) >= 10
    assert all(record.statistics and record.finish_reason == "cancelled" for record in cancelled)
    assert {record.tenant for record in mixed.records if record.status == OK} >= {"plain", "slow"}
    assert all(record.status == OK and record.statistics for record in http.records)
    assert all(record.answer for record in answers.records)

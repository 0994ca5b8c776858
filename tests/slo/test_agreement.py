"""A campaign's clients and the server's metrics tell the same story.

Wrong if they did not: dashboards would show another service than the one that users have.

Counts must be equal. Latencies may differ by what lies between decoder and client, so quantiles by one bucket.
"""

import json
import math
import re
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Sequence

import pytest
from slo_support import to_toml

from loadtests.campaign import main
from loadtests.raw_files import read_run
from loadtests.records import OK, Record
from tritonforge.observation.metrics import DEFAULT_BUCKETS

pytestmark = pytest.mark.server

SAMPLE = re.compile(r"^tritonforge_(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
DOCUMENT = {
    "schema": "tritonforge.contract/1",
    "name": "agreement",
    "revision": 1,
    "target": {"model": "llm"},
    "measurement": {"schedule_lag_p99_ms": 30_000, "residual_min_ms": -50, "in_flight_mismatch_max": 0.5},
    "profiles": [
        {
            "id": "steady",
            "data": {"seed": 1},
            "client": {"drain_s": 60.0, "idle_gap_s": 30.0, "deadline_s": 60.0},
            "prompt_tokens": {"dist": "uniform", "min": 16, "max": 100},
            "output_tokens": {"dist": "uniform", "min": 8, "max": 24},
            "arrivals": {
                "process": "poisson",
                "seed": 1,
                "phases": [{"name": "only", "rate": 8.0, "seconds": 6.0}],
            },
            "objectives": [{"id": "failed", "metric": "failed_requests", "le": 0, "max_true_rate": 0.5}],
        }
    ],
}


def scrape(server) -> dict[tuple[str, ...], float]:
    """Every sample of ours by name and label values, without those that all have."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as answer:
        found = SAMPLE.findall(answer.read().decode())
    return {
        (name, *(text for key, text in LABEL.findall(labels) if key not in ("model", "version"))): float(value)
        for name, labels, value in found
    }


def settled(server, ended: int) -> dict[tuple[str, ...], float]:
    """A scrape in which `ended` requests have ended, and a second has passed for what is told once a second."""
    deadline = time.monotonic() + 30
    while (samples := scrape(server))["num_requests_finished_total", "length"] < ended:
        assert time.monotonic() < deadline, "the last request never showed in the metrics"
        time.sleep(0.1)
    steps = samples["step_seconds_count",]
    while (samples := scrape(server))["step_seconds_count",] == steps and time.monotonic() < deadline - 28:
        time.sleep(0.1)
    return samples


def bucket_of_quantile(values: Sequence[float], bounds: Sequence[float], share: float) -> int:
    """The bucket that the quantile of `values` falls into."""
    return bisect_left(bounds, sorted(values)[math.ceil(share * len(values)) - 1])


def bucket_of_histogram(name: str, before: dict, after: dict, bounds: Sequence[float], share: float) -> int:
    """The first bucket that holds so much of what was added."""
    cumulated = [after[f"{name}_bucket", f"{b:.16g}"] - before[f"{name}_bucket", f"{b:.16g}"] for b in bounds]
    return bisect_left(cumulated, share * (after[f"{name}_count",] - before[f"{name}_count",]))


def seconds(record: Record) -> dict[str, float]:
    """What the client saw, from when it sent the request."""
    first, last = record.chunks[0][0], record.chunks[-1][0]
    return {
        "ttft_seconds": (first - record.sent_ns) / 1e9,
        "tpot_seconds": (last - first) / (record.received_tokens - 1) / 1e9,
        "e2e_seconds": (last - record.sent_ns) / 1e9,
    }


@pytest.fixture(scope="module")
def campaign(server, release_dir, tmp_path_factory):
    """The records of a campaign, and the metrics before and after it."""
    tmp_path, before = tmp_path_factory.mktemp("campaign"), settled(server, 0)  # what other tests asked is told by then
    contract = tmp_path / "given.toml"
    contract.write_text(to_toml(json.loads(json.dumps(DOCUMENT))))
    command = ["--contract", contract, "--release", release_dir, "--out", tmp_path / "out", "--url", server.grpc_url]
    assert main([str(word) for word in command]) == 0, (tmp_path / "out" / "report.json").read_text()
    records = read_run(tmp_path / "out" / "raw.jsonl").profiles[0].records
    after = settled(server, before["num_requests_finished_total", "length"] + len(records))
    return records, before, after


def test_counts_are_equal(campaign):
    records, before, after = campaign
    assert len(records) > 30 and all(record.status == OK for record in records)

    def gained(*key: str) -> float:
        return after[key] - before.get(key, 0)

    told = sum(record.received_tokens for record in records)
    assert gained("num_requests_finished_total", "length") == len(records)
    assert gained("num_requests_finished_total", "stop") == gained("num_requests_finished_total", "error") == 0
    assert gained("completion_tokens_total") == told == gained("request_generation_tokens_sum")
    assert gained("prompt_tokens_total") == sum(record.statistics["prompt_tokens"] for record in records)
    assert gained("cached_tokens_total") == sum(record.statistics["cached_tokens"] for record in records)
    assert gained("tenant_tokens_total", "completion", "none") == told
    assert gained("accepted_draft_tokens_total") == sum(record.statistics["accepted_tokens"] for record in records)
    steps = sum(record.statistics["decode_steps"] for record in records)
    assert gained("inter_token_latency_seconds_count") == steps
    for name in ("ttft", "tpot", "e2e", "queue", "prefill", "decode"):
        assert gained(f"{name}_seconds_count") == len(records), name


@pytest.mark.slow  # for a quiet machine: on a busy one a client reads its responses later than they came
def test_quantiles_are_within_a_bucket(campaign):
    records, before, after = campaign
    for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
        bounds = DEFAULT_BUCKETS[f"tritonforge_{name}"]
        seen = [seconds(record)[name] for record in records]
        for share in (0.5, 0.95):
            client = bucket_of_quantile(seen, bounds, share)
            served = bucket_of_histogram(name, before, after, bounds, share)
            print(f"{name} p{share * 100:g}: client bucket {client}, server bucket {served}")
            assert abs(client - served) <= 1, f"{name} p{share * 100:g}"

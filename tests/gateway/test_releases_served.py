"""A canary release behind the gateway, and batches that bring their own gateway, on the real server.

Wrong if an answer behind a canary were cut, mixed, or not where its tenant belongs, or if `tritonforge batch` needed a
gateway that somebody else had started.
"""

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.gateway.serving import MODEL, serve_gateway
from tests.gateway.test_batch import lines_of, request, write
from tests.server.releases import sibling
from tritonforge.rollout.routing import Share
from tritonforge.server import Server

pytestmark = [pytest.mark.server, pytest.mark.slow]

ANSWERS, TOKENS, SHARE = 120, 4, 0.25
BOUNDS = (9, 56)
"""Of 120 at 25%: outside with a probability of 1e-6 at most on either side."""


def ask(gateway, tenant, model):
    """The events of one stream."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": TOKENS, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    answer = httpx2.post(
        f"{gateway.url}/v1/chat/completions", json=body, headers=gateway.bearer(tenant), timeout=120, trust_env=False
    )
    assert answer.status_code == 200 and answer.text.count("[DONE]") == 1, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def test_a_canary_behind_the_gateway_gets_its_share_whole_and_pinned_tenants_stay(release_dir, tmp_path):
    second = sibling(release_dir, tmp_path / "second")
    tenants = ("open", "pinned", "old")
    with Server(release_dir) as server:
        tables = {
            "models": {MODEL: {"replicas": [server.grpc_url], "release": str(release_dir)}},
            "aliases": {"chat": {"models": MODEL, "releases": {"pinned": "canary", "old": "stable"}}},
        }
        with serve_gateway(None, None, tmp_path, tables, tenants) as gateway, ThreadPoolExecutor(8) as pool:
            server.rollout.canary(second, SHARE)
            replica = gateway.edge.router.models_by_name[MODEL].replicas[0]
            gateway.call(replica.look())
            route = replica.route
            assert route is not None and route.canary is not None
            asked = ["open"] * ANSWERS + ["pinned", "old"] * 10
            answers = list(pool.map(lambda tenant: ask(gateway, tenant, "chat"), asked))
            records = gateway.await_records(len(asked))
    prints = {f"fp_{one.digest[:16]}": str(one.version) for one in (route.stable, route.canary)}
    for events in answers:
        assert len({event["system_fingerprint"] for event in events}) == 1
        assert events[-1]["usage"]["completion_tokens"] == TOKENS
    by_tenant = {tenant: Counter() for tenant in tenants}
    for tenant, events in zip(asked, answers, strict=True):
        by_tenant[tenant][prints[events[0]["system_fingerprint"]]] += 1
    stable, canary = str(route.stable.version), str(route.canary.version)
    assert by_tenant["pinned"] == {canary: 10} and by_tenant["old"] == {stable: 10}
    assert BOUNDS[0] <= by_tenant["open"][canary] <= BOUNDS[1]
    for record in records:
        assert (record.outcome, record.tries, record.completion_tokens) == ("ok", 1, TOKENS)
        if record.tenant == "open":
            assert record.version == (canary if Share(SHARE).takes(record.request_id) else stable)


def batch(folder, *arguments):
    """The command's exit code and what it told."""
    command = [sys.executable, "-m", "tritonforge", "batch", str(folder / "in.jsonl"), str(folder / "out.jsonl")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


def check(folder, model, told):
    lines = lines_of(folder / "out.jsonl")
    assert [line["custom_id"] for line in lines] == [f"id-{number}" for number in range(8)], told
    for line in lines:
        body = line["response"]["body"]
        assert line["response"]["status_code"] == 200 and body["model"] == model
        assert body["usage"]["completion_tokens"] == TOKENS and body["choices"][0]["message"]["content"]


def test_a_batch_serves_its_release_by_itself_and_resumes(release_dir, tmp_path):
    write(tmp_path / "in.jsonl", [request(number, MODEL, max_tokens=TOKENS, ignore_eos=True) for number in range(8)])
    code, told = batch(tmp_path, "--release", str(release_dir), "--ordered")
    assert code == 0, told
    check(tmp_path, MODEL, told)
    before = (tmp_path / "out.jsonl").read_bytes()
    assert batch(tmp_path, "--release", str(release_dir), "--ordered")[0] == 0
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize("named", [False, True])
def test_a_batch_asks_a_server_that_runs_without_a_gateway(server, release_dir, tmp_path, named):
    model = "mine" if named else "llm"
    write(tmp_path / "in.jsonl", [request(number, model, max_tokens=TOKENS, ignore_eos=True) for number in range(8)])
    flags = ["--model", "mine", "--release", str(release_dir)] if named else []
    code, told = batch(tmp_path, "--triton", server.grpc_url, "--ordered", *flags)
    assert code == 0, told
    check(tmp_path, model, told)

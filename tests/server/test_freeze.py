"""A real campaign against the real server, which halts for 2 s: the verdict must be FAIL, because of that.

Wrong if it failed: a service could stand still before its users' eyes and pass its contract. All its processes halt, as
in a paused container: a Python stub that halts alone for a second while requests come is killed by Triton itself, and
that is a crash.
"""

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.observe import decoder_metrics  # noqa: E402
from loadtests.campaign import main  # noqa: E402
from loadtests.contract_toml import load_contract  # noqa: E402
from loadtests.raw_files import read_run  # noqa: E402
from loadtests.records import OK  # noqa: E402
from loadtests.schedule import build_schedule  # noqa: E402
from tritonforge.client import generate, infer_request  # noqa: E402
from tritonforge.launch.supervisor import State  # noqa: E402

pytestmark = [pytest.mark.server, pytest.mark.slow]

FREEZE_S = 2.0
CHANGES = (
    ("rate = 2.0, seconds = 45", "rate = 2.0, seconds = 32"),
    (
        'output_tokens = { dist = "uniform", min = 32, max = 64 }',
        'output_tokens = { dist = "uniform", min = 96, max = 160 }',
    ),
    ("schedule_lag_p99_ms = 250", "schedule_lag_p99_ms = 2000"),
)
"""The demo with fewer requests, whose streams are open for long, and a client that may be late: the tests' machine can
be busy."""


@pytest.fixture
def contract(tmp_path) -> Path:
    """The demo's workload and promises on a shorter schedule."""
    text = (ROOT / "loadtests" / "contracts" / "demo.toml").read_text()
    for old, new in CHANGES:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = tmp_path / "contract.toml"
    path.write_text(text)
    return path


def snapshots(server, campaign: Future) -> Iterator[tuple[float, float]]:
    """(requests running, tokens sampled so far), again and again while the campaign runs."""
    while not campaign.done():
        found = decoder_metrics(server)
        yield found["num_requests_running"], found["generation_tokens_total"]
    pytest.fail(f"the campaign ended, code {campaign.result()}, before a stream was there to freeze")


def await_open_stream(server, campaign: Future, after_tokens: float) -> None:
    """Return when a measured stream has sent its first tokens and is far from its last one.

    A stream that has just joined: the batch grew, and since it did, each in it was due at least 2 tokens and at most
    14. What the metrics do not show yet (100 ms) is less than the rest of an answer of at least 96, also
    where drafts come true.
    """
    seen = snapshots(server, campaign)
    while next(seen)[1] < after_tokens:
        pass
    before = joined = next(seen)
    for running, tokens in seen:
        if running <= before[0] or tokens - before[1] > 14 * running:
            before = joined = (running, tokens)
        elif running > joined[0]:
            joined = (running, tokens)
        elif tokens - joined[1] >= 2 * running:
            return


@contextmanager
def frozen(server) -> Iterator[None]:
    """Every process of the server halts inside the block, and goes on whatever happens there.

    tritonserver halts first and goes on last, so that it never finds a stub that does not answer.
    """
    pids = [server.pid, *server.stub_pids()]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)


def test_a_server_that_freezes_for_2_s_fails_the_demo_contract(server, release_dir, contract, tmp_path):
    slots = build_schedule(load_contract(contract).profiles[0])
    third = decoder_metrics(server)["generation_tokens_total"] + sum(slot.output_tokens for slot in slots) / 3
    pids = [server.pid, *server.stub_pids()]
    out = tmp_path / "out"
    command = ["--contract", contract, "--url", server.grpc_url, "--release", release_dir, "--out", out]
    with ThreadPoolExecutor(1) as pool:
        campaign = pool.submit(main, list(map(str, command)))
        await_open_stream(server, campaign, third)
        with frozen(server):
            time.sleep(FREEZE_S)  # this is the freeze itself
        code = campaign.result()
    report = json.loads((out / "report.json").read_text())
    profile = report["profiles"][0]
    assert [check for check in profile["checks"] if check["ok"] is False] == [], "the measurement itself holds"
    freeze = next(row for row in profile["objectives"] if row["id"] == "freeze")
    assert (freeze["status"], report["verdict"]["status"], code) == ("FAIL", "FAIL", 1)
    assert any("freeze: " in reason and "no request may" in reason for reason in report["verdict"]["reasons"])
    assert_one_common_gap(out / "raw.jsonl", round(freeze["le"] * 1e6))
    assert server.state is State.SERVING and [server.pid, *server.stub_pids()] == pids, "nothing was restarted"
    assert generate(server.grpc_url, infer_request("llm", text="Hi", max_tokens=2), 30).finish_reason == "length"


def assert_one_common_gap(raw: Path, limit_ns: int) -> None:
    """Every request that missed the limit ended well, and was silent during one and the same time: the freeze."""
    records = [record for record in read_run(raw).profiles[0].records if record.measured]
    assert {record.status for record in records} == {OK}
    times = [[at for at, _ in record.chunks] for record in records]
    gaps = [gap for own in times for gap in itertools.pairwise(own) if gap[1] - gap[0] > limit_ns]
    assert gaps, "the freeze met no open stream"
    assert min(end for _, end in gaps) - max(start for start, _ in gaps) > limit_ns

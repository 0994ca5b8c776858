"""The load as Locust users run it: their commands, their statistics, their workers; the verdict is still ours."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from slo_campaigns import ENVIRONMENT, document_with
from slo_stub import Stub
from slo_support import ROOT, to_toml

from loadtests.contract_toml import parse_contract
from loadtests.schedule import build_schedule, schedule_sha256


def locust(folder: Path, stub: Stub, tokenizer: Path, *arguments: str) -> subprocess.Popen:
    (folder / "given.toml").write_text(to_toml(document_with()))
    command = ["locust", "-f", str(ROOT / "loadtests" / "locustfile.py"), "--host", stub.url]
    command += ["--contract", str(folder / "given.toml"), "--tokenizer", str(tokenizer), "--out", str(folder / "out")]
    return subprocess.Popen(
        [*command, *arguments], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_plain_locust_judges_too(tmp_path, tokenizer):
    """As Locust users run it: headless, with CSV; its statistics show TTFT and TPOT, its exit code is the verdict's."""
    with Stub() as stub:
        process = locust(tmp_path, stub, tokenizer, "--headless", "--only-summary", "--csv", str(tmp_path / "stats"))
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "verdict: PASS" in output
    rows = (tmp_path / "stats_stats.csv").read_text()
    for kind in ("E2E", "TTFT", "TPOT", "TOKENS/S"):
        assert f"{kind},small/steady," in rows


def test_plain_locust_ends_on_any_error_at_the_start(tmp_path, tokenizer):
    """Wrong: it would wait for a walker that never comes, for ever."""
    (tmp_path / "out").write_text("in the way")
    with Stub() as stub:
        process = locust(tmp_path, stub, tokenizer, "--headless", "--only-summary")
        output, _ = process.communicate(timeout=40)
    assert process.returncode == 2, output
    assert "out must be a folder that can be written" in output
    assert "Traceback" not in output


OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def browse(address: str, **form: str) -> bytes:
    """What the web UI answers; with a form, to its POST."""
    data = urllib.parse.urlencode(form).encode() if form else None
    with OPENER.open(address, data, timeout=10) as answer:
        return answer.read()


def await_page(address: str, process: subprocess.Popen) -> bytes:
    deadline = time.monotonic() + 30
    while True:
        try:
            return browse(address)
        except (urllib.error.URLError, ConnectionError):
            assert process.poll() is None and time.monotonic() < deadline, "the web UI did not come up"
            time.sleep(0.1)


def test_the_web_ui_starts_the_contract_and_shows_tokens(tmp_path, tokenizer):
    """As Locust's documentation says: open the page, press Start, watch the statistics, download them."""
    port = 21_000 + os.getpid() % 5_000
    base = f"http://127.0.0.1:{port}"
    with Stub() as stub:
        process = locust(tmp_path, stub, tokenizer, "--web-host", "127.0.0.1", "--web-port", str(port))
        try:
            assert b"contract" in await_page(base + "/", process), "the contract can be chosen in the page"
            assert stub.seen == 0, "nothing runs before Start is pressed"
            started = json.loads(browse(base + "/swarm", host=stub.url, user_count="1", spawn_rate="1"))
            assert started["success"]
            deadline = time.monotonic() + 40
            while json.loads(browse(base + "/stats/requests"))["state"] not in ("stopped", "stopping"):
                assert time.monotonic() < deadline
                time.sleep(0.2)
            rows = {(row["method"], row["name"]): row for row in json.loads(browse(base + "/stats/requests"))["stats"]}
            for kind in ("E2E", "TTFT", "TPOT", "TOKENS/S"):
                assert rows[kind, "small/steady"]["num_requests"] > 50
            assert b"TTFT,small/steady," in browse(base + "/stats/requests/csv")
            report = tmp_path / "out" / "report.json"
            while not report.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
    assert json.loads(report.read_text())["verdict"]["status"] == "PASS"


@pytest.mark.parametrize("count", [1, 2, 4])
def test_workers_share_one_schedule_and_one_verdict(tmp_path, tokenizer, count):
    """Wrong: the load would depend on how many machines send it, or some requests would never be sent."""
    with Stub() as stub:
        port = str(26_000 + (os.getpid() + count) % 5_000)
        workers = [locust(tmp_path, stub, tokenizer, "--worker", "--master-port", port) for _ in range(count)]
        flags = ("--master", "--master-bind-port", port, "--expect-workers", str(count), "--headless", "--only-summary")
        output, _ = (master := locust(tmp_path, stub, tokenizer, *flags)).communicate(timeout=60)
        for worker in workers:
            worker.communicate(timeout=20)
    assert master.returncode == 0, output
    profile = json.loads((tmp_path / "out" / "report.json").read_text())["profiles"][0]
    assert len(profile["prompts_sha256"]) == count
    assert profile["schedule_sha256"] == schedule_sha256(build_schedule(parse_contract(document_with()).profiles[0]))
    assert "TTFT" in output and "TOKENS/S" in output, "the master's own statistics have them too"


def test_a_killed_worker_is_not_a_smaller_load(tmp_path, tokenizer):
    """Two workers, one dies: Locust itself would exit 0; the measurement is invalid."""
    with Stub() as stub:
        port = str(20_000 + os.getpid() % 10_000)
        workers = [locust(tmp_path, stub, tokenizer, "--worker", "--master-port", port) for _ in range(2)]
        flags = ("--master", "--master-bind-port", port, "--expect-workers", "2", "--headless", "--only-summary")
        master = locust(tmp_path, stub, tokenizer, *flags)
        deadline = time.monotonic() + 30
        while stub.seen < 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        workers[0].kill()
        output, _ = master.communicate(timeout=60)
        for worker in workers:
            worker.communicate(timeout=20)
    assert master.returncode == 3, output
    assert "a worker was lost" in output

"""The load as Locust users run it: their commands, their statistics, their workers; the verdict is still ours."""

import os
import subprocess
import time
from pathlib import Path

from slo_campaigns import ENVIRONMENT, document_with
from slo_stub import Stub
from slo_support import ROOT, to_toml


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
    for kind in ("E2E", "TTFT", "TPOT"):
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

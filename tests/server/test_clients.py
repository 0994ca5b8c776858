"""The short scripts of clients/ do, against the real server, what their first lines promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CLIENTS = Path(__file__).resolve().parents[2] / "clients"

pytestmark = pytest.mark.server


def run(script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, CLIENTS / script, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_stream_prints_text_and_finish_reason(server):
    done = run("stream.py", "The capital of France is", "--max-tokens", "8", "--url", server.grpc_url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert re.search(r"\[\d+ tokens, (length|stop)\]", done.stderr)


def test_stream_shows_the_rule_that_was_broken(server):
    done = run("stream.py", "Hello", "--max-tokens", "0", "--url", server.grpc_url)
    assert done.returncode == 1
    assert "max_tokens" in done.stderr and "got 0" in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_answers_once_over_http(server):
    url = f"http://{server.http_url}"
    done = run("generate.py", "One, two, three, four,", "--max-tokens", "8", "--url", url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert re.search(r"\[\d+ tokens, (length|stop)\]", done.stderr)


def test_generate_stops_at_a_string(server):
    url = f"http://{server.http_url}"
    plain = run("generate.py", "One, two, three, four,", "--max-tokens", "24", "--url", url).stdout.strip()
    stop = plain.split(",")[1].strip()
    stopped = run("generate.py", "One, two, three, four,", "--max-tokens", "24", "--stop", stop, "--url", url)
    assert stopped.stdout.strip() and stop not in stopped.stdout
    assert "stop]" in stopped.stderr


def test_many_answers_every_prompt(server):
    done = run("many.py", "--count", "8", "--max-tokens", "12", "--url", server.grpc_url)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split(":")[0] for line in done.stdout.splitlines()) == [str(n) for n in range(8)]


def test_cancel_ends_the_answer_early(server):
    done = run("cancel.py", "--after", "3", "--url", server.grpc_url)
    assert done.returncode == 0, done.stderr
    tokens, reason = re.search(r"\[(\d+) tokens, (\w+)\]", done.stdout).groups()
    assert reason == "cancelled" and int(tokens) < 200


@pytest.mark.parametrize("script", sorted(path.name for path in CLIENTS.glob("*.py")))
def test_scripts_stay_short(script):
    assert len((CLIENTS / script).read_text().splitlines()) < 60

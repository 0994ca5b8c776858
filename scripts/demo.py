"""From checkpoint to verdict: build the default release, serve it, ask it one question, run the demo campaign.

`make demo` calls it in the serving environment; the build runs in its own. The exit code is the campaign's, or 1.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tritonforge import terminal
from tritonforge.errors import TritonForgeError
from tritonforge.server import Server

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "smollm2-135m-int8"
RELEASE = ROOT / "artifacts" / "releases" / RECIPE
REPORT = ROOT / "artifacts" / "reports" / "demo"
CONTRACT = ROOT / "loadtests" / "contracts" / "demo.toml"
BUILD_PYTHON = ROOT / ".venv-build" / "bin" / "python"
QUESTION = "What is the capital of France?"


class Steps:
    """Says what is done now, and how long what was done before took."""

    def __init__(self, count: int) -> None:
        self._count, self._done = count, 0
        self._started = self._step_started = time.monotonic()

    def next(self, title: str) -> None:
        """Print the heading of the next step."""
        self._done += 1
        self._step_started = time.monotonic()
        print(f"\n[{self._done}/{self._count}] {title}", flush=True)

    def end(self) -> None:
        """Print the seconds of the present step."""
        print(f"      {time.monotonic() - self._step_started:.1f} s", flush=True)

    def total(self) -> float:
        """Seconds since the first step began."""
        return time.monotonic() - self._started


def run(*command: object) -> int:
    """Run a program of the repository, its output on our terminal; return its exit code.

    An interrupt goes on to the program and what it started, once, and the program is given the time to report. It has
    a process group of its own, so a Ctrl-C in the terminal does not reach it a second time.
    """
    program = subprocess.Popen([str(word) for word in command], cwd=ROOT, process_group=0)
    try:
        return program.wait()
    except KeyboardInterrupt:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGINT)
            program.wait()
        raise
    finally:
        if program.poll() is None:  # interrupted a second time
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()


def demo() -> int:
    """Run the four steps; return the exit code."""
    steps = Steps(4)
    steps.next(f"Build the release {RECIPE} (nothing to do when it is built already)")
    code = run(BUILD_PYTHON, "build/release.py", "--recipe", RECIPE)
    steps.end()
    if code:
        return code
    steps.next("Serve it on the Triton Inference Server")
    with Server(RELEASE) as server:
        print(f"      gRPC {server.grpc_url}, HTTP http://{server.http_url}, pid {server.pid}")
        steps.end()
        steps.next(f"Ask it: {QUESTION}")
        terminal.generate(server.grpc_url, QUESTION, chat=True, timeout=60.0, max_tokens=64)
        steps.end()
        steps.next(f"Measure it against {CONTRACT.relative_to(ROOT)}")
        campaign = (sys.executable, "loadtests/campaign.py", "--contract", CONTRACT, "--url", server.grpc_url)
        code = run(*campaign, "--release", RELEASE, "--out", REPORT)
        steps.end()
    print(f"\n{steps.total():.0f} s in all. The report: {(REPORT / 'report.html').relative_to(ROOT)}")
    print("Next: `make serve`, and in another terminal `.venv/bin/tritonforge chat`.")
    return code


def main() -> int:
    """Run the demo; an error is one line, Ctrl-C and SIGTERM stop the server before they end it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return demo()
    except TritonForgeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""Rehearsals of what goes wrong in the server while users are being served: a death, a slow and a hung tokenizer."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from loadtests.rehearsals_stage import (
    Crowd,
    Rehearsal,
    Stage,
    ask_once,
    ends,
    is_ready,
    request_of,
    see_service,
    serving,
    took,
    wait_until,
)
from tritonforge.server import Server

ENDS_S, BACK_S = 5.0, 20.0
PROMPTLY_S = 2.0


def stub_of(server: Server, model: str) -> int:
    """The process id of a model's Python stub."""
    return next(pid for pid in server.stub_pids() if f"/{model}/" in Path(f"/proc/{pid}/cmdline").read_text())


@contextlib.contextmanager
def arriving(url: str, *, every_s: float, **options) -> Iterator[Crowd]:
    """A crowd that a new client joins every so often, for as long as the block runs."""
    crowd, over = Crowd(url), threading.Event()

    def arrive() -> None:
        while not over.wait(every_s):
            crowd.ask(request_of(**options))

    thread = threading.Thread(target=arrive, daemon=True)
    thread.start()
    try:
        yield crowd
    finally:
        over.set()
        thread.join()


def stub_killed(stage: Stage) -> None:
    """SIGKILL to the decoder's stub, as the kernel does when memory is short, while eight streams run."""
    with serving(stage.release) as server:
        crowd = Crowd(server.grpc_url)
        for _ in range(8):
            crowd.ask(request_of(max_tokens=1500))
        crowd.all_started()
        old = server.pid
        killed = time.monotonic()
        os.kill(stub_of(server, "decoder"), signal.SIGKILL)
        with arriving(server.grpc_url, every_s=0.25, max_tokens=2) as newcomers:
            gone = wait_until(lambda: not is_ready(server.http_url), ENDS_S)
            ended = crowd.finish(ENDS_S)
            last = max(a.ended or float("inf") for a in crowd.answers) - killed
            back = wait_until(lambda: server.pid != old and is_ready(server.http_url), BACK_S)
        newcomers.finish(BACK_S)
        codes = {answer.code for answer in crowd.answers}
        stage.see(
            "told", ended and codes == {"UNAVAILABLE"}, f"{ends(crowd.answers)}; the last ended {last:.2f} s later"
        )
        stage.see("unready", gone is not None, took(gone, ENDS_S))
        waited = max((a.ended or float("inf")) - a.sent for a in newcomers.answers)
        honest = all(a.ok or a.code == "UNAVAILABLE" for a in newcomers.answers)
        stage.see("newcomers", honest, f"{ends(newcomers.answers)}; the longest took {waited:.2f} s")
        recovered = (
            f"ready again {time.monotonic() - killed:.2f} s later at most" if back is not None else took(back, BACK_S)
        )
        stage.see("recovered", back is not None, recovered)
        see_service(stage, server.grpc_url)


@contextlib.contextmanager
def slowed(pid: int, *, run_s: float, halt_s: float) -> Iterator[None]:
    """A process that gets so much of every run_s + halt_s seconds, as one that shares its core with too many others."""
    over = threading.Event()

    def drive() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(halt_s)
            os.kill(pid, signal.SIGCONT)
            over.wait(run_s)

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def dependency_slow(stage: Stage) -> None:
    """The tokenizer, which every request to llm needs first, gets an eighth of its time."""
    with serving(stage.release) as server:
        ask_once(server.grpc_url)
        usual = sorted(ask_once(server.grpc_url).ttft_s for _ in range(7))[3]
        pids = [server.pid, *server.stub_pids()]
        running = Crowd(server.grpc_url)
        running.ask(request_of("decoder", max_tokens=400, stream_interval_ms=0))
        running.all_started()
        with slowed(stub_of(server, "tokenizer"), run_s=0.05, halt_s=0.35):
            slow = [ask_once(server.grpc_url) for _ in range(8)]
        running.finish(60)
        after = sorted(ask_once(server.grpc_url).ttft_s for _ in range(7))[3]
        worst = max(answer.ttft_s or float("inf") for answer in slow)
        stage.see(
            "answered", all(a.ok and a.tokens == 8 for a in slow), f"{ends(slow)}; usual TTFT {usual * 1e3:.0f} ms"
        )
        stage.see("bounded", worst < PROMPTLY_S, f"the longest TTFT was {worst * 1e3:.0f} ms")
        gap, other = running.answers[0].longest_gap_s, running.answers[0]
        stage.see(
            "others", other.ok and other.tokens == 400 and gap < 1, f"{other.code}, longest gap {gap * 1e3:.0f} ms"
        )
        same = [server.pid, *server.stub_pids()] == pids
        fast = after < 2 * usual + 0.05
        stage.see("recovered", same and fast, f"TTFT {after * 1e3:.0f} ms; nothing was restarted: {same}")
        see_service(stage, server.grpc_url)


def dependency_hung(stage: Stage) -> None:
    """The tokenizer stops for good: it neither answers nor dies."""
    with serving(stage.release) as server:
        ask_once(server.grpc_url)
        old = server.pid
        os.kill(stub_of(server, "tokenizer"), signal.SIGSTOP)
        halted = time.monotonic()
        with arriving(server.grpc_url, every_s=0.5, max_tokens=2) as crowd:
            back = wait_until(lambda: server.pid != old and is_ready(server.http_url), 3 * BACK_S)
            healed = time.monotonic() - halted
        all_ended = crowd.finish(BACK_S)
        longest = max((a.ended or float("inf")) - a.sent for a in crowd.answers)
        honest = all_ended and all(a.ok or a.code == "UNAVAILABLE" for a in crowd.answers)
        stage.see("told", honest, f"{ends(crowd.answers)}; the longest took {longest:.2f} s")
        recovered = f"ready again after {healed:.2f} s" if back is not None else took(back, 3 * BACK_S)
        stage.see("recovered", back is not None, recovered)
        see_service(stage, server.grpc_url)


REHEARSALS = (
    Rehearsal(
        "stub-killed",
        "the decoder's process is killed while eight streams run",
        {
            "told": "every open stream ends with UNAVAILABLE within 5 s",
            "unready": "the server is not ready within 5 s, so that a load balancer looks elsewhere",
            "newcomers": "who comes meanwhile is answered, or told UNAVAILABLE; nobody hangs",
            "recovered": "the server is ready again within 20 s",
            "back": "a new request is answered",
        },
        stub_killed,
    ),
    Rehearsal(
        "dependency-slow",
        "the tokenizer gets an eighth of the time it needs",
        {
            "answered": "every request is answered in full: slow is no error",
            "bounded": "no first token takes longer than 2 s",
            "others": "a stream that needs the tokenizer no more goes on without a gap of a second",
            "recovered": "TTFT is as before once the tokenizer is, and nothing was restarted",
            "back": "a new request is answered",
        },
        dependency_slow,
    ),
    Rehearsal(
        "dependency-hung",
        "the tokenizer's process stops, and neither answers nor dies",
        {
            "told": "every request is answered, or told UNAVAILABLE; nobody hangs",
            "recovered": "the server is ready again within 60 s",
            "back": "a new request is answered",
        },
        dependency_hung,
        limit_s=180.0,
    ),
)

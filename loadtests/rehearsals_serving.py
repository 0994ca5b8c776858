"""Rehearsals of what goes wrong while users are being served: deaths, a full queue, a slow tokenizer, lost clients."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from loadtests.rehearsals_stage import (
    NO_PROXY,
    Answer,
    Crowd,
    Rehearsal,
    Stage,
    ask_once,
    is_ready,
    metric,
    request_of,
    see_service,
    serving,
    took,
    wait_until,
)
from loadtests.sweep_variant import decoder_config
from tritonforge.server import Server

ENDS_S, BACK_S = 5.0, 20.0
PROMPTLY_S = 2.0
EXTRA = 20


def stub_of(server: Server, model: str) -> int:
    """The process id of a model's Python stub."""
    return next(pid for pid in server.stub_pids() if f"/{model}/" in Path(f"/proc/{pid}/cmdline").read_text())


def ends(answers: list[Answer]) -> str:
    """How streams ended, counted."""
    return ", ".join(f"{count} {code}" for code, count in sorted(Counter(a.code for a in answers).items()))


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


def http_status(server: Server) -> tuple[int, str]:
    """Status and body of a plain HTTP request to the generate endpoint."""
    body = json.dumps({"text_input": "Hello", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"http://{server.http_url}/v2/models/llm/generate", body)
    try:
        with NO_PROXY.open(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def queue_saturated(stage: Stage) -> None:
    """As many requests as have a seat or a place in the queue, and then some more."""
    limits = decoder_config(stage.release)["scheduler"]
    seats, places = limits["max_num_seqs"], limits["max_waiting"]
    with serving(stage.release) as server:
        inside = Crowd(server.grpc_url, 120)
        for _ in range(seats):
            inside.ask(request_of(max_tokens=500, stream_interval_ms=10_000))
        inside.all_started()
        for _ in range(places):
            inside.ask(request_of(max_tokens=4))
        full = wait_until(lambda: metric(server, "num_requests_waiting") == places, 60)
        before = metric(server, "num_requests_refused_total")
        outside = Crowd(server.grpc_url)
        for _ in range(EXTRA):
            outside.ask(request_of(max_tokens=4))
        outside.finish(30)
        status, body = http_status(server)
        still = metric(server, "num_requests_waiting")
        inside.finish(120)
        slowest = max((a.ended or float("inf")) - a.sent for a in outside.answers)
        stage.see(
            "full",
            full is not None,
            f"{places} places in the queue were taken {took(full, 60)}, {still:.0f} when refusing",
        )
        refused = {a.code for a in outside.answers} == {"UNAVAILABLE"}
        stage.see(
            "refused", refused and slowest < PROMPTLY_S, f"{ends(outside.answers)}; the slowest took {slowest:.2f} s"
        )
        stage.see("http", status == 503, f"HTTP {status}: {body[:160]}")
        stage.see(
            "kept", all(a.ok for a in inside.answers), f"{seats} running and {places} waiting: {ends(inside.answers)}"
        )
        wait_until(lambda: metric(server, "num_requests_refused_total") - before >= EXTRA + 1, 2)
        counted = metric(server, "num_requests_refused_total") - before
        stage.see("counted", counted == EXTRA + 1, f"num_requests_refused_total rose by {counted:.0f}")
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


CLIENT = """import sys, threading
from tritonforge.client import connect, infer_request, stream
def follow(model):
    given = {"input_ids": [504, 3575, 282]} if model == "decoder" else {"text": "Once upon a time"}
    request = infer_request(model, stream=True, max_tokens=int(sys.argv[2]), ignore_eos=True, **given)
    with connect(sys.argv[1]) as channel:
        for number, _ in enumerate(stream(channel, request)):
            if number == 1:
                print(model, flush=True)
threads = [threading.Thread(target=follow, args=(sys.argv[3],)) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
"""A client with four streams; it says when each of them has begun."""


def lose_clients(server: Server, model: str, max_tokens: int) -> float:
    """Start a client process with four open streams and kill it; returns when (monotonic seconds)."""
    command = [sys.executable, "-c", CLIENT, server.grpc_url, str(max_tokens), model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        for _ in range(4):
            client.stdout.readline()
        client.kill()
    return time.monotonic()


def clients_disconnect(stage: Stage) -> None:
    """Client processes die in the middle of their streams, and cancel nothing."""
    with serving(stage.release) as server:
        ask_once(server.grpc_url)
        blocks = metric(server, "kv_blocks")
        staying = Crowd(server.grpc_url)
        staying.ask(request_of(max_tokens=1200, stream_interval_ms=0))
        staying.all_started()
        lose_clients(server, "decoder", 1900)
        freed = wait_until(lambda: metric(server, "num_requests_running") <= 1, ENDS_S)
        stage.see("decoder", freed is not None, f"their seats were free {took(freed, ENDS_S)}")
        lose_clients(server, "llm", 400)
        freed = wait_until(lambda: metric(server, "num_requests_running") <= 1, 2 * BACK_S)
        stage.see(
            "llm", freed is not None, f"their seats were free {took(freed, 2 * BACK_S)}; they had asked for 400 tokens"
        )
        staying.finish(60)
        other = staying.answers[0]
        untouched = other.ok and other.tokens == 1200
        stage.see(
            "others",
            untouched,
            f"{other.code}, {other.tokens} of 1200 tokens, longest gap {other.longest_gap_s * 1e3:.0f} ms",
        )
        whole = wait_until(lambda: metric(server, "kv_blocks_free") == blocks, ENDS_S)
        stage.see("no-leak", whole is not None, f"all {blocks:.0f} KV blocks were free {took(whole, ENDS_S)}")
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
        "queue-saturated",
        "more requests than the running batch and the queue hold",
        {
            "full": "the queue takes as many as the release says",
            "refused": "who comes then is refused with UNAVAILABLE within 2 s",
            "http": "over HTTP that is status 503",
            "kept": "every request that was accepted is answered in full",
            "counted": "the refusals are in the metrics, each once",
            "back": "a new request is answered",
        },
        queue_saturated,
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
    Rehearsal(
        "client-disconnects",
        "client processes die in the middle of their streams",
        {
            "decoder": "streams on decoder end within 5 s, and their seats are free",
            "llm": "streams on llm end when their answers are complete at the latest: Triton tells an ensemble's steps "
            "nothing of a lost client, so max_tokens bounds what is wasted",
            "others": "the streams of others go on to their last token",
            "no-leak": "no KV block stays taken",
            "back": "a new request is answered",
        },
        clients_disconnect,
    ),
)

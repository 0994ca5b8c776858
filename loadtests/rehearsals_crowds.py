"""Rehearsals of what users do to a server: more of them than it has room for, and some who leave without a word."""

import json
import subprocess
import sys
import urllib.error
import urllib.request

from loadtests.rehearsals_stage import (
    NO_PROXY,
    Crowd,
    Rehearsal,
    Stage,
    ask_once,
    ends,
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
        stage.see("http", status >= 400 and "UNAVAILABLE: " in body, f"HTTP {status}: {body[:160]}")
        stage.see(
            "kept", all(a.ok for a in inside.answers), f"{seats} running and {places} waiting: {ends(inside.answers)}"
        )
        wait_until(lambda: metric(server, "num_requests_refused_total") - before >= EXTRA + 1, 2)
        counted = metric(server, "num_requests_refused_total") - before
        stage.see("counted", counted == EXTRA + 1, f"num_requests_refused_total rose by {counted:.0f}")
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


def lose_clients(server: Server, model: str, max_tokens: int) -> bool:
    """Start a client process with four open streams and kill it once they run; False when they never did."""
    before = metric(server, "num_requests_running")
    command = [sys.executable, "-c", CLIENT, server.grpc_url, str(max_tokens), model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        for _ in range(4):
            client.stdout.readline()
        running = wait_until(lambda: metric(server, "num_requests_running") >= before + 4, ENDS_S)
        client.kill()
    return running is not None


def clients_disconnect(stage: Stage) -> None:
    """Client processes die in the middle of their streams, and cancel nothing."""
    with serving(stage.release) as server:
        ask_once(server.grpc_url)
        blocks = metric(server, "kv_blocks")
        staying = Crowd(server.grpc_url)
        staying.ask(request_of(max_tokens=1200, stream_interval_ms=0))
        staying.all_started()
        ran = lose_clients(server, "decoder", 1900)
        freed = wait_until(lambda: metric(server, "num_requests_running") <= 1, ENDS_S)
        stage.see("decoder", ran and freed is not None, f"their seats were free {took(freed, ENDS_S)}")
        ran = lose_clients(server, "llm", 1000)
        freed = wait_until(lambda: metric(server, "num_requests_running") <= 1, 2 * BACK_S)
        stage.see(
            "llm",
            ran and freed is not None,
            f"their seats were free {took(freed, 2 * BACK_S)}; they had asked for 1000 tokens",
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
        "queue-saturated",
        "more requests than the running batch and the queue hold",
        {
            "full": "the queue takes as many as the release says",
            "refused": "who comes then is refused with UNAVAILABLE within 2 s",
            "http": "over HTTP the status is an error's, and the body says UNAVAILABLE",
            "kept": "every request that was accepted is answered in full",
            "counted": "the refusals are in the metrics, each once",
            "back": "a new request is answered",
        },
        queue_saturated,
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

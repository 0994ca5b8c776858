"""Clients that leave, do not read, or lose their key. Wrong if they kept blocks, tasks, sockets or memory."""

import asyncio
import contextlib
import gc
import json
import os
import random
import socket
import time

import httpx2
import psutil
import pytest

from tests.gateway.serving import MODEL, await_metrics
from tests.gateway.test_streams_served import body_of, events_of, raw_request
from tritonforge.gateway.limits.keys import create_key, revoke_key

pytestmark = pytest.mark.server

LONG = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture
def await_all_free(server):
    """await_all_free(): return once no request holds a KV block."""
    return lambda: await_metrics(server, lambda told: told["kv_blocks_free"] == told["kv_blocks"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_and_is_charged_what_was_made(gateway, await_all_free, stream):
    seen = len(gateway.records)
    with socket.create_connection(gateway.address) as client:
        client.sendall(raw_request(gateway, body_of(stream=stream, **LONG)))
        if stream:
            assert client.recv(12) == b"HTTP/1.1 200"
    record = gateway.await_records(seen + 1)[-1]
    assert record.outcome == "disconnected"
    assert record.completion_tokens < LONG["max_tokens"]
    if stream:
        assert record.completion_tokens >= 1 and record.prompt_tokens > 10 and record.first_token_ms > 0
    await_all_free()


def test_a_client_that_does_not_read_is_cut_off(gateway_of, await_all_free):
    """Sixteen answers with twenty log-probabilities each are megabytes, which no buffer on the way takes."""
    with gateway_of({"edge": {"slow_client_s": 0.5}}) as gateway, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(gateway.address)
        body = body_of(stream=True, n=16, logprobs=True, top_logprobs=20, **LONG)
        client.sendall(raw_request(gateway, body))
        (record,) = gateway.await_records(1)
        assert record.outcome == "slow_client"
        client.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            while client.recv(65536):
                pass
        await_all_free()


def test_a_revoked_key_is_refused_and_ends_the_streams_that_it_began(gateway, await_all_free):
    key, text = create_key(gateway.keys_file, "open")
    headers = {"Authorization": f"Bearer {text}"}
    client = httpx2.Client(base_url=gateway.url, headers=headers, timeout=60, trust_env=False)
    with client, client.stream("POST", "/v1/chat/completions", json=body_of(stream=True, **LONG)) as answer:
        pieces = answer.iter_bytes()
        first = next(pieces)
        revoke_key(gateway.keys_file, key.id)
        assert client.get("/v1/models").status_code == 401
        events = events_of(first + b"".join(pieces))
    assert json.loads(events[-1])["error"]["code"] == "invalid_api_key"
    assert b"[DONE]" not in events
    await_all_free()


def test_keys_are_in_no_log(gateway, caplog):
    with caplog.at_level("DEBUG"):
        httpx2.get(f"{gateway.url}/v1/models", headers=gateway.bearer(), trust_env=False)
        httpx2.post(f"{gateway.url}/v1/completions", headers=gateway.bearer(), content=b"{", trust_env=False)
        httpx2.post(
            f"{gateway.url}/v1/completions",
            headers=gateway.bearer(),
            json={"model": MODEL, "prompt": "x", "max_tokens": 1},
            trust_env=False,
        )
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    secret = gateway.keys["open"].rpartition("-")[2]
    assert not any(secret in record.getMessage() for record in ours)


async def _drop_streams(gateway, count, at_once, rng):
    """Open `count` streams, `at_once` at a time, and leave each after a random number of bytes."""
    seats = asyncio.Semaphore(at_once)

    async def one():
        async with seats:
            reader, writer = await asyncio.open_connection(*gateway.address)
            writer.write(raw_request(gateway, body_of(stream=True, max_tokens=64)))
            await writer.drain()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(rng.randrange(1, 4000)), rng.choice((0.001, 0.05, 0.5)))
            writer.transport.abort() if rng.random() < 0.5 else writer.close()

    await asyncio.gather(*(one() for _ in range(count)))


def _held(gateway):
    """Tasks of the gateway's loop, and open files of the process."""

    async def tasks():
        return len(asyncio.all_tasks()), len(gateway.edge.open)

    return (*gateway.call(tasks()), psutil.Process().num_fds())


def _drop_and_compare(gateway, count, at_once):
    rng = random.Random(7)
    seen = len(gateway.records)
    before = _held(gateway)
    asyncio.run(_drop_streams(gateway, count, at_once, rng))
    gateway.await_records(seen + count, 600)
    deadline = time.monotonic() + 60
    while _held(gateway) > before:
        assert time.monotonic() < deadline, (_held(gateway), before)
        time.sleep(0.05)


def test_streams_dropped_at_random_points_leave_nothing(gateway, http, await_all_free):
    http.get("/v1/models")
    _drop_and_compare(gateway, 40, 20)
    await_all_free()
    assert http.post("/v1/chat/completions", json=body_of(max_tokens=4)).status_code == 200


@pytest.mark.slow
def test_a_thousand_dropped_streams_leave_nothing(gateway, http, await_all_free):
    http.get("/v1/models")
    _drop_and_compare(gateway, 100, 50)
    gc.collect()
    before = psutil.Process(os.getpid()).memory_info().rss
    _drop_and_compare(gateway, 1000, 50)
    await_all_free()
    gc.collect()
    grown = psutil.Process(os.getpid()).memory_info().rss - before
    print(f"memory of the gateway's process grew by {grown / 2**20:.1f} MiB")
    assert grown < 16 * 2**20
    assert http.post("/v1/chat/completions", json=body_of(max_tokens=4)).status_code == 200

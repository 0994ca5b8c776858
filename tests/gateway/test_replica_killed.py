"""A real replica killed under load. Wrong if a client saw more of it than it must."""

import asyncio
import json
import os
import signal

import httpx2
import pytest

from tests.gateway.serving import serve_gateway
from tritonforge.server import Server

pytestmark = [pytest.mark.server, pytest.mark.slow]

CHAT = "/v1/chat/completions"


def body_of(number):
    """Half of the answers are long and streamed, half are whole and short."""
    long = number % 2 == 0
    fields = {"stream": True, "max_tokens": 200} if long else {"max_tokens": 4}
    message = {"role": "user", "content": f"Story {number}"}
    return {"model": "m", "messages": [message], "temperature": 0, "ignore_eos": True} | fields


def test_a_replica_killed_under_load_fails_only_the_answers_that_it_had_begun(server, release_dir, tmp_path):
    """Thirty-two requests over two servers; one is killed once its first stream has begun."""
    with Server(release_dir) as second:
        tables = {
            "models": {"m": {"replicas": [server.grpc_url, second.grpc_url], "release": str(release_dir)}},
            "routing": {"failures": 2, "open_s": 0.5},
        }
        with serve_gateway(None, release_dir, tmp_path, tables) as gateway:
            answers = asyncio.run(_load(gateway, second))
            records = {record.request_id: record for record in gateway.await_records(len(answers))}
    broken = 0
    for request_id, text in answers:
        record = records[request_id]
        if record.stream and text.rstrip().endswith("data: [DONE]"):
            assert record.completion_tokens == 200 and text.count("[DONE]") == 1
        elif record.stream:
            event = json.loads(text.rstrip().splitlines()[-1].removeprefix("data: "))
            assert event["error"]["code"] == "answer_broken_off" and record.replica == second.grpc_url
            broken += 1
        else:
            assert json.loads(text)["usage"]["completion_tokens"] == 4
    assert broken >= 1


async def _load(gateway, second):
    """Send all, and kill the second server once one of its streams has begun: (request id, text) of each answer."""
    killed = asyncio.Event()

    async def ask(client, number):
        async with client.stream("POST", CHAT, json=body_of(number)) as answer:
            assert answer.status_code == 200, await answer.aread()
            text = ""
            async for piece in answer.aiter_text():
                text += piece
                if not killed.is_set() and _streams(gateway, second):
                    killed.set()
                    os.kill(second.pid, signal.SIGKILL)
            return answer.headers["x-request-id"], text

    limits = httpx2.Limits(max_connections=32)
    async with httpx2.AsyncClient(
        base_url=gateway.url, headers=gateway.bearer(), timeout=300, limits=limits, trust_env=False
    ) as client:
        return await asyncio.gather(*(ask(client, number) for number in range(32)))


def _streams(gateway, server):
    """Whether this server has begun a stream that is open."""
    return any(
        exchange.work and exchange.work.stream and exchange.answered_by == server.grpc_url
        for exchange in tuple(gateway.edge.open)
    )

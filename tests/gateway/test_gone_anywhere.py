"""A client that leaves, and a server that stops, at every single step of a request, without a server.

Wrong if there were a step at which a seat, a token of a quota, a generation or a task stayed behind, or after which a
request was recorded twice or never.
"""

import asyncio
import json
import time
from collections import Counter

import pytest

from tritonforge.client import Chunk
from tritonforge.gateway.config import GatewayConfig
from tritonforge.gateway.edge import Edge
from tritonforge.gateway.endpoint import endpoints
from tritonforge.gateway.limits.leases import MemoryLeases
from tritonforge.gateway.limits.quota import Quota, open_storage
from tritonforge.gateway.routing.backend import Prompt
from tritonforge.gateway.routing.model_info import ModelInfo
from tritonforge.gateway.routing.router import Route

TOKENS, PROMPT = 3, (1, 2, 3)
LIMITS = {"concurrent_requests": 5, "requests_per_minute": 1000, "tokens_per_minute": 10_000, "tokens_per_day": 10_000}
NOW = time.time()


async def steps(count=2):
    """Let everything else run `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


class SlowLeases(MemoryLeases):
    """A store over a network: it takes some steps before it has a command, and some before its answer is here."""

    async def acquire(self, tenant, limit):
        await steps()
        lease = await super().acquire(tenant, limit)
        await steps()
        return lease

    async def release(self, tenant, lease):
        await steps()
        await super().release(tenant, lease)


class SlowStorage:
    """See SlowLeases."""

    def __init__(self):
        self.inner, self.held = open_storage("memory"), Counter()

    async def incr(self, counter, expiry, amount=1):
        await steps()
        self.held[counter] += amount
        await steps()
        return self.held[counter]


class Generation:
    """Writes TOKENS tokens, some steps each, and knows until the end what it has cost."""

    served = None

    def __init__(self):
        self.begun, self.written, self.running = False, 0, False

    def statistics(self):
        return {"prompt_tokens": len(PROMPT), "completion_tokens": self.written, "cached_tokens": 0}

    async def chunks(self):
        self.begun = self.running = True
        for place in range(TOKENS):
            await steps()
            self.written += 1
            last = place == TOKENS - 1
            outputs = {"text_output": ("x",), "token_ids": (7,), "finish_reason": ("stop" if last else "",)}
            self.running = not last
            yield Chunk("x", (7,), outputs=outputs, statistics=self.statistics() if last else None)

    async def abandon(self):
        await steps()
        self.running = False
        return self.statistics() if self.begun else None

    @property
    def spent(self):
        return sum(self.statistics().values()) if self.begun else 0


class OneModel:
    """A router with one model, and its backend."""

    def __init__(self):
        self.generations = []

    def find(self, model, caller):
        return Route(ModelInfo("m", max_model_len=64), self)

    async def tokenize(self, text, options):
        await steps()
        return Prompt(PROMPT)

    def generate(self, prompt, options, request_id, work=None):
        self.generations.append(Generation())
        return self.generations[-1]


async def answered(body, *, leaves=None, stops=None):
    """Serve `body` to a client that leaves, or from a server that stops, after some steps: the number of all, and how
    it ended.
    """
    storage, leases, router, records = SlowStorage(), SlowLeases(), OneModel(), []
    quota = Quota(storage.inner, lambda: NOW)
    quota._storage = storage
    edge = Edge(GatewayConfig.of_tables({"defaults": LIMITS}), None, quota, leases, router, observers=(records.append,))
    given = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive():
        if (message := next(given, None)) is not None:
            return message
        await (asyncio.Event().wait() if leaves is None else steps(leaves))
        return {"type": "http.disconnect"}

    async def send(message):
        await steps(1)

    scope = {"type": "http", "headers": []}
    task = asyncio.create_task(endpoints(edge)["/v1/completions"](scope, receive, send))
    count = 0
    while not task.done() and count < 1000:
        if count == stops:
            task.cancel()
        await asyncio.sleep(0)
        count += 1
    await task
    await steps(3)
    assert not _ours(asyncio.all_tasks())
    assert not edge.open and not leases._held
    assert not any(generation.running for generation in router.generations)
    spent = sum(generation.spent for generation in router.generations)
    assert set(storage.held.values()) <= {spent}, (storage.held, spent)
    assert len(records) == 1
    assert records[0].prompt_tokens + records[0].completion_tokens == spent
    return count, records[0].outcome


def _ours(tasks):
    """Tasks that wait in our code; the store of `limits` has one of its own, which ends by itself."""
    names = [task.get_coro().__qualname__ for task in tasks if task is not asyncio.current_task()]
    return [name for name in names if "MemoryStorage" not in name]


@pytest.mark.parametrize("prompt", ["one", ["one", "two"]])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["leaves", "stops"])
def test_nothing_is_left_at_whatever_step_a_request_ends(prompt, stream, how):
    body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "stream": stream}
    count, outcome = asyncio.run(answered(body))
    assert outcome == "ok" and count > 30
    outcomes = Counter(asyncio.run(answered(body, **{how: step}))[1] for step in range(1, count))
    assert outcomes["disconnected" if how == "leaves" else "failed"] > 20

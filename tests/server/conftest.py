"""Asking the real server: an answer with all that it came with, and a server whose seats are all taken."""

import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from tritonforge.client import Chunk, connect, infer_request, stream

TIMEOUT_S = 120.0
POLL_S = 0.02
SEATS = 32
"""max_num_seqs of the release under test."""


@dataclass(frozen=True)
class Answer:
    """The responses to one request, in order."""

    chunks: list[Chunk]

    @property
    def text(self) -> str:
        """With n = 1: the text."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of all answers, in the order in which they came."""
        return self.output("token_ids")

    @property
    def finish_reason(self) -> str | None:
        """With n = 1: why it ended."""
        return self.chunks[-1].finish_reason

    @property
    def statistics(self) -> dict[str, int]:
        """Those of the last response; no other may have any."""
        assert not any(chunk.statistics for chunk in self.chunks[:-1])
        return self.chunks[-1].statistics

    def output(self, name: str) -> tuple:
        """The elements of an output tensor, joined over the responses that have it."""
        return tuple(element for chunk in self.chunks for element in chunk.outputs.get(name, ()))

    def samples(self) -> dict[int, tuple[str, tuple[int, ...], str | None]]:
        """With n > 1: text, tokens and finish reason by index."""
        samples: dict[int, tuple[str, tuple[int, ...], str | None]] = {}
        for chunk in self.chunks:
            outputs, start = chunk.outputs, 0
            reasons = outputs.get("finish_reason", ("",) * len(outputs["index"]))
            rows = zip(outputs["index"], outputs["text_output"], outputs["token_counts"], reasons, strict=True)
            for index, text, count, reason in rows:
                before = samples.get(index, ("", (), None))
                tokens = outputs["token_ids"][start : start + count]
                samples[index] = (before[0] + text, before[1] + tokens, reason or before[2])
                start += count
            assert start == len(outputs["token_ids"]), "a token belongs to no answer"
        return samples


Ask = Callable[..., Answer]


@pytest.fixture(scope="session")
def channel(server) -> Iterator[grpc.Channel]:
    with connect(server.grpc_url) as opened:
        yield opened


@pytest.fixture(scope="session")
def ask(channel) -> Ask:
    """ask(text, **options): the whole answer of llm; with `model` or `input_ids` that of another model."""

    def ask(text: str = "The capital of France is", *, model: str = "llm", **options: Any) -> Answer:
        given = None if "input_ids" in options else text
        request = infer_request(model, text=given, **({"max_tokens": 12} | options))
        return Answer(list(stream(channel, request, TIMEOUT_S)))

    return ask


class Seats:
    """Streams that hold every seat of the running batch, until each is closed."""

    def __init__(self, server, channel: grpc.Channel, tenant: str | None) -> None:
        self._server = server
        options = {"max_tokens": 1000, "ignore_eos": True, "stream": True, "stream_interval_ms": 10000}
        request = dict(input_ids=[504, 3575, 282], tenant=tenant, speculate=False, **options)
        self._open = [stream(channel, infer_request("decoder", **request), TIMEOUT_S) for _ in range(SEATS)]
        for one in self._open:
            next(one)
        self.await_waiting(0)

    def free_one(self) -> None:
        """Leave one seat."""
        self._open.pop().close()

    def await_waiting(self, count: int) -> None:
        """Return once `count` requests wait."""
        deadline = time.monotonic() + TIMEOUT_S
        while read_metric(self._server, "num_requests_waiting") != count:
            assert time.monotonic() < deadline, f"{count} requests never waited"
            time.sleep(POLL_S)

    def close(self) -> None:
        """Leave all seats."""
        while self._open:
            self.free_one()


@pytest.fixture
def occupied(server, channel) -> Callable[..., Any]:
    """`with occupied(tenant) as seats`: inside, nobody gets a seat but who is more entitled to one."""

    @contextmanager
    def occupied(tenant: str | None = None) -> Iterator[Seats]:
        seats = Seats(server, channel, tenant)
        try:
            yield seats
        finally:
            seats.close()

    return occupied


@pytest.fixture
def await_all_free(server) -> Callable[[], None]:
    """await_all_free(): return once no request holds a KV block."""

    def await_all_free() -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while read_metric(server, "kv_blocks_free") != read_metric(server, "kv_blocks"):
            assert time.monotonic() < deadline, "KV blocks are still held"
            time.sleep(POLL_S)

    return await_all_free


def read_metric(server, name: str) -> float:
    """A decoder metric's value on Triton's metrics port; `name` is without its prefix."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as answer:
        found = re.search(rf"^tritonforge_{name}{{.*}} (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(found.group(1))

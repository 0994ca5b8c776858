"""One try of a request at one place: what a place hands to the router, and what the router tells back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tritonforge.client import Chunk
from tritonforge.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    TritonForgeError,
)
from tritonforge.gateway.routing.backend import Generation, Prompt, Unreachable
from tritonforge.gateway.routing.breaker import CircuitBreaker
from tritonforge.gateway.routing.model_info import ModelInfo
from tritonforge.gateway.routing.router import Caller
from tritonforge.gateway.work import Work


class Late(TritonForgeError):
    """The first token did not come in time."""

    code = "DEADLINE_EXCEEDED"


class NotHere(InvalidRequest):
    """The request cannot go to this place: what it asks for has no form there."""


def reason_of(error: TritonForgeError) -> str | None:
    """Why another place may be asked (see routing_config.REASONS); None: no other would answer either."""
    if isinstance(error, Late):
        return "timeout"
    if isinstance(error, Overloaded | NotFound):
        return "unavailable"
    if isinstance(error, InvalidRequest | Cancelled | DeadlineExceeded):
        return None
    return "failed"


def is_breakage(error: TritonForgeError) -> bool:
    """Whether the place is broken, as against one that is only full, draining or right."""
    return isinstance(error, Unreachable | Late) or reason_of(error) == "failed"


@dataclass(frozen=True, slots=True)
class Fitted:
    """What one place is asked. `work` is what `options` were made of."""

    prompt: Prompt
    options: Mapping[str, Any]
    work: Work | None


class Desk:
    """Counts the requests that one replica, or one managed API, works on, and keeps its breaker."""

    def __init__(self, name: str, breaker: CircuitBreaker) -> None:
        self.name, self.breaker = name, breaker
        self.outstanding = 0

    @property
    def healthy(self) -> bool:
        """Whether it says that it is ready; true where nobody asks."""
        return True


class Attempt:
    """A request at a desk. It has an outcome exactly once: `finished`, `failed` or, in the end, `close`."""

    def __init__(self, desk: Desk, start: Callable[[], Any], info: ModelInfo, version: str = "") -> None:
        """`start` is a coroutine function that gives the generation; `info` and `version` say who would answer."""
        self.desk, self.info, self.version = desk, info, version
        self._start = start
        self._pass = desk.breaker.enter()
        self._told = self._closed = False
        self._generation: Generation | None = None
        self._chunks: AsyncIterator[Chunk] | None = None
        desk.outstanding += 1

    async def next(self, timeout_s: float | None) -> Chunk | None:
        """The next chunk; None after the last. Raises TimeoutError, or TritonForgeError."""
        async with asyncio.timeout(timeout_s):
            if self._chunks is None:
                self._generation = await self._start()
                self._chunks = self._generation.chunks()
            return await anext(self._chunks, None)

    def answered(self) -> None:
        """Its first chunk is there."""
        self._pass = self.desk.breaker.began(self._pass)

    def finished(self) -> None:
        """An answer came to its end."""
        self._tell(self.desk.breaker.succeeded)

    def failed(self, error: TritonForgeError) -> None:
        """It failed, before or after its first chunk."""
        if is_breakage(error):
            self._tell(self.desk.breaker.failed)
        else:
            self._tell(self.desk.breaker.left)

    async def close(self) -> dict[str, int] | None:
        """End it, if it runs; its statistics when they are known. May be called again."""
        self._tell(self.desk.breaker.left)
        if self._closed:
            return None
        self._closed = True
        self.desk.outstanding -= 1
        return None if self._generation is None else await self._generation.abandon()

    def _tell(self, outcome: Callable[[Any], None]) -> None:
        if not self._told:
            self._told = True
            outcome(self._pass)


class Place(Protocol):
    """Somewhere a request can be answered: a model on its replicas, or a managed API."""

    info: ModelInfo

    @property
    def desks(self) -> Sequence[Desk]:
        """Where its requests are worked on."""

    async def tokenize(self, text: str, options: Mapping[str, Any], caller: Caller) -> Prompt:
        """The prompt, with what it was made from. Raises TritonForgeError."""

    async def fit(self, fitted: Fitted, caller: Caller) -> Fitted:
        """What was made for another place, for this one. Raises NotHere, or another TritonForgeError."""

    def open(self, fitted: Fitted, request_id: str, caller: Caller, tried: set[str]) -> Attempt | None:
        """The next try, at a desk that is not in `tried` (it is added); None when there is no more."""

    def may(self, caller: Caller) -> bool:
        """Whether this caller's requests may go there."""

    async def ready(self) -> bool:
        """Whether it can answer now."""

    async def close(self) -> None:
        """Let go of its connections."""

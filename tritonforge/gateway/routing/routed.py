"""The backend of one request: tries places in turn until one begins to answer, and none after that.

The router makes one for each request. A try ends, and is cancelled where it runs, before the next one begins, so no
answer is written twice; once a chunk was passed on, a failure is told and not repaired.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from tritonforge.client import Chunk
from tritonforge.errors import DeadlineExceeded, Overloaded, TritonForgeError
from tritonforge.gateway.api.errors import ApiError
from tritonforge.gateway.routing.attempts import Attempt, Fitted, Late, NotHere, Place, is_breakage, reason_of
from tritonforge.gateway.routing.backend import Prompt
from tritonforge.gateway.routing.config import Alias
from tritonforge.gateway.routing.model_info import Served
from tritonforge.gateway.routing.router import Caller
from tritonforge.gateway.work import Work

log = logging.getLogger(__name__)
Made = TypeVar("Made")


class Watcher(Protocol):
    """Is told of tries; the metrics are."""

    def tried(self, model: str, replica: str, result: str) -> None:
        """A try ended: ok, unavailable, failed, timeout, refused or left."""

    def fell_back(self, alias: str, model: str, reason: str) -> None:
        """Another model, or a managed API, answers for this reason."""


class RoutedBackend:
    """See Backend, for the request of one caller. `places` are asked in this order."""

    def __init__(self, places: Sequence[Place], alias: Alias, caller: Caller, watcher: Watcher) -> None:
        self.places = [place for place in places if place.may(caller)]
        self.alias, self.caller, self.watcher = alias, caller, watcher
        self.ends = None if alias.deadline_s is None else time.monotonic() + alias.deadline_s

    async def tokenize(self, text: str, options: Mapping[str, Any]) -> Prompt:
        """See Backend: by the first place that can."""
        first: TritonForgeError | None = None
        for place in self.places:
            try:
                return await self.in_time(place.tokenize(text, options, self.caller))
            except DeadlineExceeded:
                raise
            except TritonForgeError as error:
                if first is None and reason_of(error) not in self.alias.retry_on:
                    raise
                first = first or error
        raise first or Overloaded("no place can be asked")

    @property
    def left_s(self) -> float | None:
        """Seconds until the request's own end; None without one."""
        return None if self.ends is None else max(0.0, self.ends - time.monotonic())

    async def in_time(self, awaitable: Awaitable[Made]) -> Made:
        """Its result. Raises DeadlineExceeded at the request's own end."""
        try:
            async with asyncio.timeout(self.left_s):
                return await awaitable
        except TimeoutError:
            raise self.late() from None

    def late(self) -> DeadlineExceeded:
        """The error of a request whose time has run out."""
        return DeadlineExceeded(f"no answer within {self.alias.deadline_s:g} s")

    def generate(
        self, prompt: Prompt, options: Mapping[str, Any], request_id: str, work: Work | None = None
    ) -> "RoutedGeneration":
        """See Backend."""
        if self.caller.traceparent:
            options = {**options, "traceparent": self.caller.traceparent}
        return RoutedGeneration(self, Fitted(prompt, options, work), request_id)

    async def ready(self) -> bool:
        """See Backend."""
        return any([await place.ready() for place in self.places])

    async def close(self) -> None:
        """See Backend: the places are the router's."""


class RoutedGeneration:
    """See Generation."""

    def __init__(self, backend: RoutedBackend, fitted: Fitted, request_id: str) -> None:
        self._backend, self._fitted, self._request_id = backend, fitted, request_id
        self._alias = backend.alias
        self._began = time.monotonic()
        self._attempt: Attempt | None = None
        self._tries = 0
        self._first_error: TritonForgeError | None = None
        self._cost: dict[str, int] | None = None
        self.served: Served | None = None

    async def chunks(self) -> AsyncIterator[Chunk]:
        """See Generation. Raises ApiError once an answer that has begun breaks off."""
        chunk = await self._begin()
        attempt = self._attempt
        assert attempt is not None
        while chunk is not None:
            if chunk.finish_reason is not None:
                attempt.finished()
            yield chunk
            try:
                chunk = await self._within(attempt, self._alias.gap_s)
            except TritonForgeError as error:
                attempt.failed(error)
                self._told_failure(attempt, error)
                self._cost = await attempt.close()
                raise broken_off(error) from None
        await attempt.close()

    async def abandon(self) -> dict[str, int] | None:
        """See Generation."""
        if self._attempt is None:
            return None
        if self.served is None:
            self._report("left")
        return await self._attempt.close() or self._cost

    async def _begin(self) -> Chunk:
        """The first chunk of the first place that has one. Raises the first error when there is none."""
        places = self._backend.places
        made_by = self._fitted.prompt.made_by
        names = [place.info.name for place in places]
        start = names.index(made_by) if made_by in names else 0
        for place in places[start:]:
            if place is not places[0] and not self._first_error and "unavailable" not in self._alias.retry_on:
                break
            try:
                fitted = self._fitted
                if place is not places[0] or made_by:
                    fitted = await self._backend.in_time(place.fit(fitted, self._backend.caller))
            except DeadlineExceeded:
                raise
            except TritonForgeError as error:  # it cannot go there, or its tokenizer is away
                self._keep(error)
                continue
            chunk = await self._try_at(place, fitted)
            if chunk is not None:
                return chunk
        raise self._first_error or Overloaded("no place can be asked now")

    async def _try_at(self, place: Place, fitted: Fitted) -> Chunk | None:
        """The first chunk from `place`; None when it has no more to try, for a reason that lets others be asked."""
        tried: set[str] = set()
        most = self._tries + self._alias.max_tries  # of this place: a crowd of full replicas leaves fallbacks their own
        while self._tries < most:
            request_id = self._request_id + (f"-t{self._tries}" if self._tries else "")
            attempt = place.open(self._timed(fitted), request_id, self._backend.caller, tried)
            if attempt is None:
                return None
            self._attempt, self._tries = attempt, self._tries + 1
            try:
                chunk = await self._first_chunk(attempt, streamed=fitted.work is not None and fitted.work.stream)
            except TritonForgeError as error:
                await self._failed(attempt, error)
                continue
            attempt.answered()
            self._report("ok")
            self.served = Served(attempt.info, attempt.desk.name, attempt.version, self._fallback(place), self._tries)
            return chunk
        return None

    async def _failed(self, attempt: Attempt, error: TritonForgeError) -> None:
        """End the try. Raises `error` when no other place may be asked for it."""
        attempt.failed(error)
        self._told_failure(attempt, error)
        reason = reason_of(error)
        self._report(reason or "refused")
        await attempt.close()
        self._attempt = None
        later = self._first_error is not None  # a place that was asked for another's sake cannot refuse for it
        self._keep(error)
        if isinstance(error, DeadlineExceeded) or (reason not in self._alias.retry_on and not later):
            raise error

    def _keep(self, error: TritonForgeError) -> None:
        if self._first_error is None and not isinstance(error, NotHere):
            self._first_error = error

    def _fallback(self, place: Place) -> str:
        if self._first_error is None and place is self._backend.places[0]:
            return ""
        reason = (reason_of(self._first_error) if self._first_error else None) or "unavailable"
        if place is not self._backend.places[0]:
            self._backend.watcher.fell_back(self._alias.name, place.info.name, reason)
        return reason

    async def _first_chunk(self, attempt: Attempt, *, streamed: bool) -> Chunk:
        """Raises Late after first_token_s (of an answer that is not streamed, the first chunk is the last)."""
        chunk = await self._within(attempt, self._alias.first_token_s if streamed else None)
        if chunk is None:
            raise TritonForgeError("the answer ended without a chunk")
        if chunk.finish_reason == "cancelled" and not chunk.token_ids:
            raise Overloaded("the server cancelled the request before its first token")
        return chunk

    async def _within(self, attempt: Attempt, most_s: float | None) -> Chunk | None:
        """The next chunk. Raises Late after `most_s`, DeadlineExceeded at the request's own end."""
        left = self._backend.left_s
        try:
            return await attempt.next(min((one for one in (most_s, left) if one is not None), default=None))
        except TimeoutError:
            if left is not None and (most_s is None or left <= most_s):
                raise self._backend.late() from None
            raise Late(f"nothing came for {most_s:g} s") from None

    def _timed(self, fitted: Fitted) -> Fitted:
        """With the time that is left: a later try has not the whole of it again."""
        own = fitted.options.get("timeout_ms")
        spent = int((time.monotonic() - self._began) * 1e3)
        limits = [] if own is None else [max(1, own - spent)]
        left = self._backend.left_s
        limits += [] if left is None else [max(1, int(left * 1e3))]
        return replace(fitted, options={**fitted.options, "timeout_ms": min(limits)}) if limits else fitted

    def _told_failure(self, attempt: Attempt, error: TritonForgeError) -> None:
        """For who looks why a breaker opens; clients are not told so much."""
        if is_breakage(error):
            log.warning("request %s failed at %s: %s", self._request_id, attempt.desk.name, error)

    def _report(self, result: str) -> None:
        if self._attempt is not None:
            self._backend.watcher.tried(self._attempt.info.name, self._attempt.desk.name, result)


def broken_off(error: TritonForgeError) -> Exception:
    """What a client is told when an answer fails after its first token."""
    if not is_breakage(error) and not isinstance(error, Overloaded):
        return error
    message = (
        "The answer broke off: the server that wrote it failed. What came before is incomplete; nothing was retried."
    )
    return ApiError(502, message, "answer_broken_off", type="server_error")

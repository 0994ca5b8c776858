"""The ASGI side of an endpoint: reads the body within bounds, notices a client that leaves, and sends what it is given.

A client that takes nothing for too long is cut off: what it would be told is bounded by the buffers of its connection.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from tritonforge.gateway.api.errors import ApiError

ABORT = "tritonforge.abort"
"""ASGI extension of our server protocol: a function that closes the connection without waiting for its buffers."""

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
"""No proxy on the way may gather, compress or keep the events of a stream."""


class SlowClient(Exception):
    """The client has not taken anything for too long."""


async def read_body(scope: Scope, receive: Receive, most: int, timeout_s: float) -> bytes:
    """The request's body. Raises ApiError 413 when it has more than `most` bytes, 408 when it takes too long."""
    headers = dict(scope["headers"])
    told = headers.get(b"content-length", b"0")
    if told.isdigit() and int(told) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > most:
                    raise _too_large(most)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, "The request's body did not arrive in time.", "timeout") from None


class ClientGone(Exception):
    """The client left before its request was complete."""


def _too_large(most: int) -> ApiError:
    message = f"The request's body must have at most {most} bytes."
    return ApiError(413, message, "request_too_large", headers={"Connection": "close"})


async def until_gone(receive: Receive) -> None:
    """Return once the client has closed the connection, or the answer is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Sender:
    """Sends one response."""

    def __init__(self, scope: Scope, send: Send, timeout_s: float) -> None:
        self._send, self._timeout_s = send, timeout_s
        self._abort = scope.get("extensions", {}).get(ABORT)
        self.status: int | None = None
        self.complete = False
        """The last byte is on its way: whether the client is gone no longer matters."""

    async def send_json(self, status: int, content: Any, headers: Mapping[str, str]) -> None:
        """A whole response."""
        body = encode(content)
        told = {"content-type": "application/json", "content-length": str(len(body))} | dict(headers)
        await self._begin(status, told)
        await self._body(body, more=False)

    async def begin_stream(self, headers: Mapping[str, str]) -> None:
        """The start of a stream."""
        await self._begin(200, STREAM_HEADERS | dict(headers))

    async def send_events(self, contents: list[Any]) -> None:
        """One event for each of `contents`, in one piece. Raises SlowClient."""
        if contents:
            await self._body(b"".join(b"data: " + encode(one) + b"\n\n" for one in contents), more=True)

    async def end_stream(self, *, done: bool) -> None:
        """`done`: say so; a stream that ends with an error does not."""
        await self._body(b"data: [DONE]\n\n" if done else b"", more=False)

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._message({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, body: bytes, *, more: bool) -> None:
        self.complete = not more
        await self._message({"type": "http.response.body", "body": body, "more_body": more})

    async def _message(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            if self._abort is not None:
                self._abort()
            raise SlowClient from None


def encode(content: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()

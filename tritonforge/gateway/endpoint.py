"""The two endpoints that generate: from a request's bytes to its answer, whole or streamed.

One task answers while another waits for the client to leave; whichever is first decides. The status of a stream is sent
with its first token, so that all that can be refused is refused with a status of its own.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from tritonforge.gateway.api.bodies import read
from tritonforge.gateway.api.chat import ChatReply
from tritonforge.gateway.api.completions import CompletionReply
from tritonforge.gateway.api.errors import ApiError, internal, revoked, unavailable
from tritonforge.gateway.api.replies import Reply, Usage
from tritonforge.gateway.api.schemas import ChatRequest, CompletionRequest
from tritonforge.gateway.edge import Edge
from tritonforge.gateway.exchange import Exchange
from tritonforge.gateway.limits.taking import to_the_end
from tritonforge.gateway.responses import ClientGone, Sender, SlowClient, read_body, until_gone
from tritonforge.gateway.routing.router import Route
from tritonforge.gateway.work import Work, of_chat, of_completion

log = logging.getLogger(__name__)

Plan = Callable[[Exchange, bytes], tuple[Work, Route]]


def plan_chat(exchange: Exchange, body: bytes) -> tuple[Work, Route]:
    """The work of a chat completion and where it goes. Raises ApiError."""
    asked = read(ChatRequest, body)
    route = exchange.find(asked.model)
    return of_chat(asked, exchange.tenant, takes_tools=route.info.takes_tools), route


def plan_completion(exchange: Exchange, body: bytes) -> tuple[Work, Route]:
    """The work of a completion and where it goes. Raises ApiError."""
    asked = read(CompletionRequest, body)
    route = exchange.find(asked.model)
    return of_completion(asked, exchange.tenant, exchange.edge.config.edge.max_prompts), route


class GenerateEndpoint:
    """An ASGI application for one path."""

    def __init__(self, edge: Edge, name: str, prefix: str, plan: Plan, reply: type[Reply]) -> None:
        self._edge, self._name, self._prefix, self._plan, self._reply = edge, name, prefix, plan, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._edge.tasks.add(task)
        try:
            await self._serve(scope, receive, send)
        finally:
            self._edge.tasks.discard(task)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        exchange = Exchange(self._edge, self._name, headers)
        sender = Sender(scope, send, self._edge.config.edge.slow_client_s)
        try:
            exchange.authenticate(headers.get("authorization", ""))
        except ApiError as error:
            with contextlib.suppress(ClientGone, SlowClient):
                await sender.send_json(error.status, error.body(), exchange.headers | dict(error.headers))
            return
        error = None
        try:
            limits = self._edge.config.edge
            body = await read_body(scope, receive, limits.max_body_bytes, limits.body_timeout_s)
            await self._until_gone(exchange, sender, receive, body)
        except ApiError as told:
            error = told
        except ClientGone:
            exchange.outcome = exchange.outcome or "disconnected"
        except SlowClient:
            exchange.outcome = exchange.outcome or "slow_client"
        except asyncio.CancelledError:  # the server stops, and has waited long enough
            error = unavailable("The gateway stops.")
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            error = internal()
        await self._finish(exchange, sender, error)

    async def _until_gone(self, exchange: Exchange, sender: Sender, receive: Receive, body: bytes) -> None:
        """Answer, unless the client leaves before that."""
        exchange.task = asyncio.create_task(self._answer(exchange, sender, body))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait((exchange.task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not exchange.task.done() and not sender.complete:
                exchange.end_for("disconnected")
            await exchange.task
        except asyncio.CancelledError:
            if exchange.outcome == "revoked":
                raise revoked() from None
            if exchange.outcome is None:  # it was not the answer that was cancelled, but this
                exchange.task.cancel()
                await asyncio.gather(exchange.task, return_exceptions=True)
                raise
            raise ClientGone from None
        finally:
            gone.cancel()

    async def _answer(self, exchange: Exchange, sender: Sender, body: bytes) -> None:
        await exchange.admit()
        work, route = self._plan(exchange, body)
        await exchange.begin(work, route)
        work = exchange.work or work
        reply = self._reply(work, route.info, self._prefix + exchange.request_id[4:], int(exchange.created))
        if work.stream:
            await self._stream(exchange, sender, reply)
            return
        async with contextlib.aclosing(exchange.gains()) as found:
            async for gains in found:
                reply.info = exchange.info
                reply.push(gains)
        await sender.send_json(200, reply.body(_usage(exchange)), exchange.headers)

    async def _stream(self, exchange: Exchange, sender: Sender, reply: Reply) -> None:
        async with contextlib.aclosing(exchange.gains()) as found:
            async for gains in found:
                reply.info = exchange.info
                events = reply.chunks(gains)
                if sender.status is None:
                    await sender.begin_stream(exchange.headers)
                await sender.send_events(events)
        if reply.work.include_usage:
            await sender.send_events([reply.usage_chunk(_usage(exchange))])
        await sender.end_stream(done=True)

    async def _finish(self, exchange: Exchange, sender: Sender, error: ApiError | None) -> None:
        """Free everything, then tell what went wrong, if anybody is there to hear it."""
        status = sender.status or (error.status if error else 499)
        try:
            await to_the_end(exchange.close(status, error))
        except asyncio.CancelledError:  # the server stops: nothing more can be told
            return
        except Exception:
            log.exception("request %s could not be settled", exchange.request_id)
        if error is None or sender.complete:
            return
        try:
            if sender.status is None:
                await sender.send_json(error.status, error.body(), exchange.headers | dict(error.headers))
            else:
                await sender.send_events([error.body()])
                await sender.end_stream(done=False)
        except (SlowClient, asyncio.CancelledError):
            pass


def _usage(exchange: Exchange) -> Usage:
    return Usage(*(exchange.usage(name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")))


def endpoints(edge: Edge) -> dict[str, Any]:
    """Path -> ASGI application."""
    return {
        "/v1/chat/completions": GenerateEndpoint(edge, "chat", "chatcmpl-", plan_chat, ChatReply),
        "/v1/completions": GenerateEndpoint(edge, "completions", "cmpl-", plan_completion, CompletionReply),
    }

"""A managed, OpenAI-compatible API as a place to answer: what a router falls back on. Called over HTTP, streamed.

Only requests go there whose every field has the same meaning there; nothing is dropped on the way. Tokens are counted
by the provider; before its answer they are estimated.
"""

import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx2

from tritonforge.client import Chunk
from tritonforge.errors import InvalidRequest, Overloaded, TritonForgeError
from tritonforge.gateway.api.fields import EXTENSIONS
from tritonforge.gateway.api.schemas import ChatRequest, CompletionRequest
from tritonforge.gateway.routing.attempts import Attempt, Desk, Fitted, NotHere
from tritonforge.gateway.routing.backend import Generation, Prompt, Unreachable
from tritonforge.gateway.routing.breaker import BreakerPolicy, CircuitBreaker
from tritonforge.gateway.routing.config import ManagedTable
from tritonforge.gateway.routing.managed_chunks import BYTES_PER_TOKEN, ChunkReader
from tritonforge.gateway.routing.model_info import ModelInfo, Served
from tritonforge.gateway.routing.router import Caller
from tritonforge.gateway.tables import secret_of
from tritonforge.launch.ports import is_loopback

NO_LIMIT = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
"""A request that waited for a connection would look like a late answer, and open the breaker: tenants have limits."""
MOST_TOLD_BYTES = 500
"""Of what a refusal says; it goes to the log."""
OURS = frozenset(EXTENSIONS) - {"timeout_ms"}
"""Fields that no other API has; timeout_ms is kept by the router."""


REFUSALS = (400, 413, 422)
"""Statuses that are about the request; any other is about the API, or the account."""
log = logging.getLogger(__name__)


class ManagedModel:
    """See Place. Make it inside the event loop."""

    def __init__(self, table: ManagedTable, breaker: BreakerPolicy) -> None:
        """Raises SetupError when the variable that should hold the key is not set."""
        self.info = ModelInfo(table.name)
        self._table = table
        self._desk = Desk(table.name, CircuitBreaker(breaker))
        headers = {}
        if table.key_env is not None:
            key = secret_of(f"[managed.{table.name}] needs its key", table.key_env)
            headers["Authorization"] = f"Bearer {key}"
        url = httpx2.URL(table.base_url.rstrip("/") + "/")
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx2.Timeout(None, connect=table.connect_s),
            limits=NO_LIMIT,
            trust_env=not is_loopback(f"{url.host}:{url.port or 443}"),
        )

    @property
    def desks(self) -> Sequence[Desk]:
        """See Place."""
        return [self._desk]

    def may(self, caller: Caller) -> bool:
        """See Place."""
        return self._table.tenants is None or caller.tenant.name in self._table.tenants

    async def ready(self) -> bool:
        """See Place: nobody is asked; a breaker that is open says no."""
        return self._desk.breaker.allows

    async def close(self) -> None:
        """See Place."""
        await self._client.aclose()

    async def tokenize(self, text: str, options: Mapping[str, Any], caller: Caller) -> Prompt:
        """See Place: as many ids as it may have tokens; they say nothing but their number."""
        size = len(text.encode()) + len(str(options.get("messages", "")).encode())
        return Prompt(range(size // BYTES_PER_TOKEN + 1), None, text, options, self.info.name)

    async def fit(self, fitted: Fitted, caller: Caller) -> Fitted:
        """See Place."""
        body_of(fitted, self._table.model)
        return fitted

    def open(self, fitted: Fitted, request_id: str, caller: Caller, tried: set[str]) -> Attempt | None:
        """See Place: it is tried once."""
        if self._desk.name in tried or not self._desk.breaker.allows:
            return None
        tried.add(self._desk.name)

        async def start() -> Generation:
            path = "chat/completions" if isinstance(fitted.work and fitted.work.asked, ChatRequest) else "completions"
            headers = {"x-request-id": request_id}
            if caller.traceparent:
                headers["traceparent"] = caller.traceparent
            body = body_of(fitted, self._table.model)
            request = self._client.build_request("POST", path, json=body, headers=headers)
            return ManagedGeneration(request, self._client, len(fitted.prompt.token_ids))

        return Attempt(self._desk, start, self.info)


def body_of(fitted: Fitted, model: str) -> dict[str, Any]:
    """The request in OpenAI's form, streamed with its usage. Raises NotHere for one that has no such form."""
    work, prompt = fitted.work, fitted.prompt
    asked = None if work is None else work.asked
    if work is None or asked is None:
        raise NotHere("only requests in OpenAI's form can go to a managed API")
    body = asked.model_dump(exclude_none=True, by_alias=True)
    for name in OURS & body.keys():
        raise NotHere(f"{name} has no form in OpenAI's API")
    if work.top_logprobs is not None:
        raise NotHere("logprobs of another tokenizer have no ids here")
    if isinstance(asked, CompletionRequest):
        if not prompt.text:
            raise NotHere("token ids must go to the model that they were made for")
        body["prompt"] = prompt.text
    for name in ("timeout_ms", "service_tier", "user", "safety_identifier"):  # ours to keep, or nobody's business there
        body.pop(name, None)
    return body | {"model": model, "stream": True, "stream_options": {"include_usage": True}}


class ManagedGeneration:
    """See Generation: one request of the API."""

    def __init__(self, request: httpx2.Request, client: httpx2.AsyncClient, prompt_tokens: int) -> None:
        """`prompt_tokens` is what is charged unless the API counts them."""
        self._request, self._client = request, client
        self._reader = ChunkReader(prompt_tokens)
        self._response: httpx2.Response | None = None
        self.served: Served | None = None

    async def chunks(self) -> AsyncIterator[Chunk]:
        """See Generation."""
        reader = self._reader
        try:
            self._response = await self._client.send(self._request, stream=True)
            if self._response.status_code != 200:
                raise await _refusal(self._response)
            async for line in self._response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    break
                for chunk in reader.push(_event(data)):
                    yield chunk
            yield reader.last()
        except httpx2.RequestError as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        finally:
            if self._response is not None:
                await self._response.aclose()

    async def abandon(self) -> dict[str, int] | None:
        """See Generation: the connection is closed; the API does not tell what it cost, so that is estimated."""
        if self._response is not None:
            await self._response.aclose()
        return self._reader.statistics() if self._reader.begun else None


def _event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict) or "error" in event:
        raise TritonForgeError("the managed API ended its stream with an error")
    return event


async def _refusal(response: httpx2.Response) -> TritonForgeError:
    """What a status other than 200 stands for. Its text is for the log alone: it may name the account."""
    told = bytearray()
    async for part in response.aiter_bytes():
        told += part
        if len(told) >= MOST_TOLD_BYTES:
            break
    status = response.status_code
    text = told[:MOST_TOLD_BYTES].decode(errors="replace")
    log.warning("a managed API answered %d: %s", status, text)
    if status == 429:
        return Overloaded("the managed API answered 429")
    if status in REFUSALS:
        return InvalidRequest(f"the model that answers in place of another refuses the request ({status})")
    return TritonForgeError(f"the managed API answered {status}")

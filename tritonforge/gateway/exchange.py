"""One request from its arrival to its record: who asks, what is left to them, the answer's gains, and what it cost.

An endpoint makes one, calls admit, begin and gains in this order, and close whatever happened.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from tritonforge.client import Chunk
from tritonforge.errors import TritonForgeError
from tritonforge.gateway.answers import Gain, gains_of
from tritonforge.gateway.backend import Generation, Prompt
from tritonforge.gateway.config import Tenant
from tritonforge.gateway.edge import AnswerFilter, Edge
from tritonforge.gateway.errors import ApiError, invalid, of_model_error, unavailable
from tritonforge.gateway.merge import merge
from tritonforge.gateway.quota import Reservation
from tritonforge.gateway.records import Record, tell
from tritonforge.gateway.router import Route
from tritonforge.gateway.work import PromptSource, Work

ANONYMOUS = "default"
"""The tenant of all requests at an edge without keys."""


class Run:
    """One prompt's way through the backend, and what is known of its cost."""

    def __init__(self, generation: Generation, prompt: Prompt, offset: int) -> None:
        self.generation, self.prompt, self.offset = generation, prompt, offset
        self.statistics: dict[str, int] | None = None
        self.seen_tokens = 0
        self.answered = False

    async def chunks(self) -> AsyncIterator[tuple["Run", Chunk]]:
        """The backend's chunks."""
        async for chunk in self.generation.chunks():
            self.answered = True
            self.seen_tokens += len(chunk.token_ids)
            self.statistics = chunk.statistics or self.statistics
            yield self, chunk

    async def abandon(self) -> None:
        """End it, if it has not ended."""
        self.statistics = await self.generation.abandon() or self.statistics

    def usage(self, name: str) -> int:
        """prompt_tokens, completion_tokens or cached_tokens; without statistics what was seen of them."""
        if self.statistics is not None:
            return self.statistics[name]
        seen = {"prompt_tokens": len(self.prompt.token_ids), "completion_tokens": self.seen_tokens}
        return seen.get(name, 0) if self.answered else 0


class Exchange:
    """See the module's docstring."""

    def __init__(self, edge: Edge, endpoint: str, headers: Mapping[str, str]) -> None:
        self.edge, self.endpoint = edge, endpoint
        self.request_id = f"req_{uuid.uuid4().hex}"
        self.client_request_id = _printable(headers.get("x-request-id", ""))
        self.created = time.time()
        self.tenant = Tenant()
        self.key_id = ""
        self.work: Work | None = None
        self.route: Route | None = None
        self.headers: dict[str, str] = {"x-request-id": self.request_id}
        self.outcome: str | None = None
        self.task: asyncio.Task | None = None
        self._arrived = time.perf_counter()
        self._first_token_ms: float | None = None
        self._lease: str | None = None
        self._reservation = Reservation()
        self._runs: list[Run] = []
        self._filters: list[AnswerFilter] = []
        self._reasons: list[str] = []

    def authenticate(self, authorization: str) -> None:
        """Who asks. Raises ApiError 401 without a valid key."""
        if self.edge.keys is None:
            self.tenant = self.edge.config.tenant(ANONYMOUS)
            return
        scheme, _, text = authorization.partition(" ")
        key = self.edge.keys.find(text.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise ApiError(
                401,
                "Incorrect API key provided." if text else "You didn't provide an API key: send it as a Bearer token.",
                "invalid_api_key",
                type="authentication_error",
                headers={"WWW-Authenticate": "Bearer"},
            )
        self.key_id, self.tenant = key.id, self.edge.config.tenant(key.tenant)
        self.edge.open.add(self)

    async def admit(self) -> None:
        """Take a seat and count the request. Raises ApiError 429."""
        limit = self.tenant.concurrent_requests
        if limit is not None:
            self._lease = await self.edge.leases.acquire(self.tenant.name, limit)
            if self._lease is None:
                message = f"Rate limit reached: concurrent_requests is {limit}."
                raise ApiError(429, message, "rate_limit_exceeded", type="requests", headers={"Retry-After": "1"})
        self.headers |= await self.edge.quota.count_request(self.tenant)

    def find(self, model: str) -> Route:
        """The way to `model`. Raises ApiError: 403 when the tenant may not use it, 404, 503."""
        allowed = self.tenant.models
        if allowed is not None and model not in allowed:
            message = f"This key may not use the model {model[:80]!r}."
            raise ApiError(403, message, "model_not_allowed", "model", "permission_error")
        self.route = self.edge.router.find(model, self.tenant)
        return self.route

    async def begin(self, work: Work, route: Route) -> None:
        """Tokenize, and reserve the tokens that the answers may need. Raises ApiError."""
        for hook in self.edge.hooks:
            work = await hook.on_work(work, self.tenant)
        self.work = work
        needs_texts = work.top_logprobs is not None and route.info.tokens is None
        if needs_texts:
            raise invalid("logprobs", "logprobs needs the release's tokenizer, which this gateway was not given")
        self._filters = [found for hook in self.edge.hooks if (found := hook.filter_for(work, self.tenant))]
        try:
            prompts = await asyncio.gather(*(self.tokenize(source, route) for source in work.prompts))
        except TritonForgeError as error:
            raise of_model_error(error) from None
        limits = [_max_tokens(work, prompt, route.info.max_model_len) for prompt in prompts]
        needed = sum(len(prompt.token_ids) + work.n * (most or 0) for prompt, most in zip(prompts, limits, strict=True))
        self._reservation = await self.edge.quota.reserve(self.tenant, needed)
        self.headers |= self._reservation.headers
        for index, (prompt, most) in enumerate(zip(prompts, limits, strict=True)):
            options = dict(work.options) | ({} if most is None else {"max_tokens": most})
            generation = route.backend.generate(prompt, options, f"{self.request_id}-{index}")
            self._runs.append(Run(generation, prompt, index * work.n))

    async def tokenize(self, source: PromptSource, route: Route) -> Prompt:
        """The token ids of a prompt. Raises TritonForgeError."""
        if source.token_ids is not None:
            return Prompt(source.token_ids)
        return await route.backend.tokenize(source.text, source.options)

    async def gains(self) -> AsyncIterator[list[Gain]]:
        """What the answers gain, as it comes. Raises ApiError."""
        try:
            async for run, chunk in merge([run.chunks() for run in self._runs]):
                gains = [self._seen(replace(gain, index=gain.index + run.offset)) for gain in gains_of(chunk)]
                if gains:
                    yield gains
        except TritonForgeError as error:
            raise of_model_error(error) from None

    def _seen(self, gain: Gain) -> Gain:
        if self._first_token_ms is None and gain.token_ids:
            self._first_token_ms = self._elapsed_ms()
        if gain.finish_reason == "cancelled":
            raise unavailable("The answer was cancelled by the server.")
        for one in self._filters:
            gain = one.push(gain)
        if gain.finish_reason:
            self._reasons.append(gain.finish_reason)
        return gain

    def usage(self, name: str) -> int:
        """prompt_tokens, completion_tokens or cached_tokens of all prompts until now."""
        return sum(run.usage(name) for run in self._runs)

    def end_for(self, outcome: str) -> None:
        """See Revocable: also what an endpoint calls when the client is gone."""
        if self.outcome is None and self.task is not None:
            self.outcome = outcome
            self.task.cancel()

    async def close(self, status: int, error: ApiError | None) -> None:
        """Free all that the request holds, charge what it used, and tell the observers. Call it once."""
        self.edge.open.discard(self)
        try:
            await asyncio.gather(*(run.abandon() for run in self._runs))
            await self.edge.quota.settle(
                self._reservation, self.usage("prompt_tokens") + self.usage("completion_tokens")
            )
        finally:
            if self._lease is not None:
                await self.edge.leases.release(self.tenant.name, self._lease)
            tell(self.edge.observers, self._record(status, error))

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._arrived) * 1e3

    def _record(self, status: int, error: ApiError | None) -> Record:
        outcome = self.outcome or ("ok" if error is None else "failed" if error.status >= 500 else "refused")
        return Record(
            request_id=self.request_id,
            client_request_id=self.client_request_id,
            endpoint=self.endpoint,
            tenant=self.tenant.name,
            key_id=self.key_id,
            model=self.work.model if self.work else "",
            user=self.work.user if self.work else "",
            stream=bool(self.work and self.work.stream),
            status=status,
            outcome=outcome,
            error_code=error.code if error else None,
            prompt_tokens=self.usage("prompt_tokens"),
            completion_tokens=self.usage("completion_tokens"),
            cached_tokens=self.usage("cached_tokens"),
            finish_reasons=tuple(self._reasons),
            started=self.created,
            first_token_ms=self._first_token_ms,
            duration_ms=self._elapsed_ms(),
        )


def _max_tokens(work: Work, prompt: Prompt, max_model_len: int | None) -> int | None:
    """Tokens that each answer may have; None lets the decoder decide, where the context's length is not known.

    Nothing is cut here: too many are refused by the decoder, with its rule.
    """
    if work.max_tokens is not None or max_model_len is None:
        return work.max_tokens
    return max(1, max_model_len - len(prompt.token_ids))


def _printable(text: str) -> str:
    return text if len(text) <= 128 and text.isprintable() and text.isascii() else ""

"""One request from its arrival to its record: who asks, what is left to them, the answer's gains, and what it cost.

An endpoint makes one, calls admit, begin and gains in this order, and close whatever happened.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

from tritonforge.errors import TritonForgeError
from tritonforge.gateway.accounting.records import Content, Record, tell
from tritonforge.gateway.accounting.trace import Trace
from tritonforge.gateway.answers import Gain, gains_of
from tritonforge.gateway.api.errors import ApiError, invalid, of_model_error, unauthorized
from tritonforge.gateway.config import Tenant
from tritonforge.gateway.edge import Edge
from tritonforge.gateway.ids import new_request_id, printable
from tritonforge.gateway.lengths import max_tokens, reserved_tokens
from tritonforge.gateway.limits.quota import Reservation
from tritonforge.gateway.limits.taking import take
from tritonforge.gateway.merge import merge
from tritonforge.gateway.progress import Progress
from tritonforge.gateway.routing.backend import Prompt
from tritonforge.gateway.routing.model_info import ModelInfo, Served
from tritonforge.gateway.routing.router import Caller, Route
from tritonforge.gateway.runs import Run
from tritonforge.gateway.work import PromptSource, Work
from tritonforge.options import PRIORITIES

log = logging.getLogger(__name__)

PRIORITY_HEADER, LOW = "x-tritonforge-priority", "low"
"""A request that may wait for all others says so, whatever its tenant's class is."""
ANONYMOUS = "default"
"""The tenant of all requests at an edge without keys."""


class Exchange:
    """See the module's docstring."""

    def __init__(self, edge: Edge, endpoint: str, headers: Mapping[str, str]) -> None:
        self.edge, self.endpoint = edge, endpoint
        self.request_id = new_request_id()
        self.client_request_id = printable(headers.get("x-request-id", ""))
        self.created = time.time()
        self.tenant = Tenant()
        self.key_id = ""
        self.work: Work | None = None
        self.route: Route | None = None
        self.trace = Trace.of_header(headers.get("traceparent", ""), edge.trace_ratio)
        self.headers = {"x-request-id": self.request_id, "traceparent": self.trace.traceparent}
        self.outcome: str | None = None
        self.task: asyncio.Task | None = None
        self._priority = headers.get(PRIORITY_HEADER, "")
        self._progress = Progress()
        self._lease: str | None = None
        self._reservation = Reservation()
        self._runs: list[Run] = []
        self._running: Run | None = None

    def authenticate(self, authorization: str) -> None:
        """Who asks, and how urgently. Raises ApiError 401 without a valid key."""
        self._identify(authorization)
        if self._priority not in ("", LOW):
            raise invalid(None, f"The header {PRIORITY_HEADER} must be {LOW}, got {self._priority[:80]!r}")
        if self._priority:
            self.tenant = replace(self.tenant, priority_class=PRIORITIES - 1)
        self.edge.open.add(self)

    def _identify(self, authorization: str) -> None:
        if self.edge.keys is None:
            self.tenant = self.edge.config.tenant(ANONYMOUS)
            return
        scheme, _, text = authorization.partition(" ")
        key = self.edge.keys.find(text.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            self.edge.metrics.denied(self.endpoint)
            raise unauthorized(given=bool(text))
        self.key_id, self.tenant = key.id, self.edge.config.tenant(key.tenant)

    async def admit(self) -> None:
        """Take a seat and count the request. Raises ApiError 429."""
        limit = self.tenant.concurrent_requests
        if limit is not None:
            self._lease = await take(self.edge.leases.acquire(self.tenant.name, limit), self._release)
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
        caller = Caller(self.request_id, self.tenant, self.trace.traceparent)
        self.route = self.edge.router.find(model, caller)
        return self.route

    @property
    def info(self) -> ModelInfo:
        """The model whose gains came last; before any, the one that was asked."""
        served = self._running.generation.served if self._running else None
        return served.info if served else self._routed.info

    @property
    def answered_by(self) -> str:
        """The replica whose chunk came last; empty before the first one."""
        served = self._running.generation.served if self._running else None
        return served.replica if served else ""

    @property
    def _routed(self) -> Route:
        assert self.route is not None
        return self.route

    async def begin(self, work: Work, route: Route) -> None:
        """Tokenize, and reserve the tokens that the answers may need. Raises ApiError."""
        self.work = replace(work, prompts=())  # for the record of a request that a hook refuses
        for hook in self.edge.hooks:
            work = await hook.on_work(work, self.tenant, self._progress.note)
        self.work = work
        needs_texts = work.top_logprobs is not None and route.info.tokens is None
        if needs_texts:
            raise invalid("logprobs", "logprobs needs the release's tokenizer, which this gateway was not given")
        filters = (hook.filter_for(work, self.tenant, self._progress.note) for hook in self.edge.hooks)
        kept = self.tenant.audit_content
        self._progress.begin([found for found in filters if found], work.n, keep=kept)
        try:
            prompts = await asyncio.gather(*(self.tokenize(source, route) for source in work.prompts))
        except TritonForgeError as error:
            raise of_model_error(error) from None
        limits = [max_tokens(work, prompt, route.info.max_model_len) for prompt in prompts]
        needed = reserved_tokens(work.n, prompts, limits, route.info.max_model_len)
        quota = self.edge.quota
        self._reservation = await take(quota.reserve(self.tenant, needed), lambda taken: quota.settle(taken, 0))
        self.headers |= self._reservation.headers
        for index, (prompt, most) in enumerate(zip(prompts, limits, strict=True)):
            options = dict(work.options) | ({} if most is None else {"max_tokens": most})
            generation = route.backend.generate(prompt, options, f"{self.request_id}-{index}", work)
            self._runs.append(Run(generation, prompt, index * work.n))

    async def tokenize(self, source: PromptSource, route: Route) -> Prompt:
        """The token ids of a prompt. Raises TritonForgeError."""
        if source.token_ids is not None:
            return Prompt(source.token_ids)
        return await route.backend.tokenize(source.text, source.options)

    async def gains(self) -> AsyncGenerator[list[Gain], None]:
        """What the answers gain, as it comes. Raises ApiError. Close it: runs must not be read while they are ended."""
        try:
            async with aclosing(merge([run.chunks() for run in self._runs])) as chunks:
                async for run, chunk in chunks:
                    self._running = run
                    self._tell_who_answers()
                    found = [
                        await self._progress.see(run, replace(gain, index=gain.index + run.offset))
                        for gain in gains_of(chunk)
                    ]
                    if gains := [gain for gain in found if gain is not None]:
                        yield gains
        except TritonForgeError as error:
            raise of_model_error(error) from None

    def _tell_who_answers(self) -> None:
        """Before the first gain is told: the name of the model, when it is not the one that was asked."""
        if self.info.name != self._routed.info.name:
            self.headers["x-tritonforge-served-by"] = self.info.name

    def usage(self, name: str) -> int:
        """prompt_tokens, completion_tokens or cached_tokens of all prompts until now."""
        return sum(run.usage(name) for run in self._runs)

    def end_for(self, outcome: str) -> None:
        """See Revocable: also what an endpoint calls when the client is gone."""
        if self.outcome is None and self.task is not None and self.task.cancel():  # False: it had ended before
            self.outcome = outcome

    async def close(self, status: int, error: ApiError | None) -> None:
        """Free all that the request holds, charge what it used, and tell the observers. Call it once."""
        self.edge.open.discard(self)
        async with AsyncExitStack() as rest:  # the last one first, and each whatever becomes of those before it
            rest.callback(lambda: tell(self.edge.observers, self._record(status, error)))
            rest.push_async_callback(self._release, self._lease)
            rest.push_async_callback(self._settle)
            failures = await asyncio.gather(*(run.abandon() for run in self._runs), return_exceptions=True)
            for failure in (one for one in failures if isinstance(one, Exception)):
                log.error("an answer to request %s could not be ended", self.request_id, exc_info=failure)

    async def _settle(self) -> None:
        used = self.usage("prompt_tokens") + self.usage("completion_tokens")
        await self.edge.quota.settle(self._reservation, used)

    async def _release(self, lease: str | None) -> None:
        if lease is not None:
            await self.edge.leases.release(self.tenant.name, lease)

    def _record(self, status: int, error: ApiError | None) -> Record:
        outcome = self.outcome or ("ok" if error is None else "failed" if error.status >= 500 else "refused")
        work = self.work or Work("", (), {})
        served = next((run.generation.served for run in self._runs if run.generation.served), None)
        return Record(
            request_id=self.request_id,
            client_request_id=self.client_request_id,
            endpoint=self.endpoint,
            tenant=self.tenant.name,
            key_id=self.key_id,
            model=work.model,
            user=work.user,
            stream=work.stream,
            status=status,
            outcome=outcome,
            error_code=error.code if error else None,
            prompt_tokens=self.usage("prompt_tokens"),
            completion_tokens=self.usage("completion_tokens"),
            cached_tokens=self.usage("cached_tokens"),
            finish_reasons=tuple(self._progress.reasons),
            started=self.created,
            first_token_ms=self._progress.first_token_ms,
            duration_ms=self._progress.elapsed_ms(),
            trace_id=self.trace.trace_id,
            span_id=self.trace.span_id,
            parent_id=self.trace.parent,
            sampled=self.trace.sampled,
            filtered=tuple(self._progress.filtered),
            content=self._content(work) if self.tenant.audit_content else None,
            **_who(served),
        )

    def _content(self, work: Work) -> Content:
        prompts = tuple(source.text or str(source.options.get("messages", "")) for source in work.prompts)
        return Content(prompts, tuple(text for _, text in sorted(self._progress.answers.items())))


def _who(served: Served | None) -> dict[str, Any]:
    if served is None:
        return {}
    names = {name: getattr(served, name) for name in ("replica", "version", "fallback", "tries")}
    return {"served_model": served.info.name} | names

"""A model on its replicas: watches them, and chooses one for each request: the least busy that is healthy, or the one
that has the prompt's beginning in its cache.

Where a server has a canary release, the share that the server tells decides about stable and canary (routing.py).
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tritonforge.errors import Overloaded, TritonForgeError
from tritonforge.gateway.routing.attempts import Attempt, Desk, Fitted, NotHere, is_breakage, reason_of
from tritonforge.gateway.routing.backend import Generation, Prompt
from tritonforge.gateway.routing.breaker import CircuitBreaker
from tritonforge.gateway.routing.config import RoutingLimits
from tritonforge.gateway.routing.model_info import ModelInfo
from tritonforge.gateway.routing.prefixes import PrefixIndex
from tritonforge.gateway.routing.router import Caller
from tritonforge.gateway.routing.triton_backend import TritonBackend
from tritonforge.rollout.routing import Route, Target

log = logging.getLogger(__name__)

UNHEALTHY_AFTER = 2
"""Answers in a row that a replica must owe or deny: one late answer of a busy machine is none."""


class Replica(Desk):
    """One server."""

    def __init__(self, url: str, backend: TritonBackend, breaker: CircuitBreaker) -> None:
        super().__init__(url, breaker)
        self.backend = backend
        self.route: Route | None = None
        self._refused = 0
        self._told = False

    @property
    def healthy(self) -> bool:
        """Whether it said so, or was not asked yet."""
        return self._refused < UNHEALTHY_AFTER

    async def look(self) -> None:
        """Ask whether it is ready, and for its releases; while it does not tell these, what it told last holds."""
        ready, told = await asyncio.gather(self.backend.ready(), self._ask_route(), return_exceptions=True)
        if isinstance(ready, BaseException):
            raise ready
        if isinstance(told, BaseException) and not isinstance(told, TritonForgeError):
            raise told
        was = self.healthy
        self._refused = 0 if ready else self._refused + 1
        if was != self.healthy:
            log.warning("replica %s is %s", self.name, "ready" if self.healthy else "not ready")

    async def known(self) -> bool:
        """Ask for its releases unless it has told them before; whether it tells of some only now.

        A gateway may be asked before its first look around. Raises TritonForgeError.
        """
        if self._told:
            return False
        await self._ask_route()
        return self.route is not None

    async def _ask_route(self) -> None:
        self.route = await self.backend.route()
        self._told = True

    def target(self, caller: Caller) -> Target | None:
        """The release that answers the caller; None for a server that tells none."""
        if self.route is None:
            return None
        if caller.release is not None:
            return self.route.canary if caller.release == "canary" and self.route.canary else self.route.stable
        return self.route.target(caller.request_id, caller.tenant.name)


class ReplicatedModel:
    """See Place. Make it inside the event loop; it watches its replicas until it is closed."""

    def __init__(self, info: ModelInfo, urls: Sequence[str], limits: RoutingLimits) -> None:
        self.info, self._limits = info, limits
        self.replicas = [Replica(url, TritonBackend(url), CircuitBreaker(limits.breaker)) for url in urls]
        self._prefixes = PrefixIndex()
        self._turn = 0
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            found = await asyncio.gather(*(replica.look() for replica in self.replicas), return_exceptions=True)
            for replica, error in zip(self.replicas, found, strict=True):
                if isinstance(error, Exception):  # the others are watched on
                    log.error("replica %s cannot be looked at: %r", replica.name, error)
            await asyncio.sleep(self._limits.health_s)

    @property
    def desks(self) -> Sequence[Desk]:
        """See Place."""
        return self.replicas

    def may(self, caller: Caller) -> bool:
        """See Place."""
        return True

    async def ready(self) -> bool:
        """See Place."""
        return any(await asyncio.gather(*(replica.backend.ready() for replica in self.replicas)))

    async def close(self) -> None:
        """See Place."""
        self._watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watching
        await asyncio.gather(*(replica.backend.close() for replica in self.replicas))

    async def tokenize(self, text: str, options: Mapping[str, Any], caller: Caller) -> Prompt:
        """See Place: by the first replica that can."""
        tried: set[str] = set()
        first: TritonForgeError | None = None
        while (replica := self._choose((), tried)) is not None:
            tried.add(replica.name)
            given = replica.breaker.enter()
            try:
                await replica.known()
                prompt = await self._tokenize_at(replica, replica.target(caller), text, options)
            except TritonForgeError as error:
                (replica.breaker.failed if is_breakage(error) else replica.breaker.left)(given)
                if reason_of(error) is None:
                    raise
                first = first or error
            except BaseException:
                replica.breaker.left(given)
                raise
            else:
                replica.breaker.began(given)
                return prompt
        raise first or Overloaded(f"no replica of {self.info.name} can be asked")

    async def _tokenize_at(
        self, replica: Replica, target: Target | None, text: str, options: Mapping[str, Any]
    ) -> Prompt:
        version, digest = (str(target.version), target.digest) if target else ("", "")
        prompt = await replica.backend.tokenize(text, options, version)
        return replace(prompt, text=text, options=options, made_by=self.info.name, digest=digest)

    async def fit(self, fitted: Fitted, caller: Caller) -> Fitted:
        """See Place: another model's prompt is tokenized anew; an answer that may fill the context fills ours."""
        prompt, options, work = fitted.prompt, fitted.options, fitted.work
        if prompt.made_by == self.info.name:
            return fitted
        if not prompt.made_by:
            raise NotHere("token ids must go to the model that they were made for")
        if work is not None and work.top_logprobs is not None and self.info.tokens is None:
            raise NotHere("logprobs needs the release's tokenizer at the edge")
        prompt = await self.tokenize(prompt.text, prompt.options, caller)
        if self.info.max_model_len is not None and work is not None and work.max_tokens is None:
            options = {**options, "max_tokens": max(1, self.info.max_model_len - len(prompt.token_ids))}
        return Fitted(prompt, options, work)

    def open(self, fitted: Fitted, request_id: str, caller: Caller, tried: set[str]) -> Attempt | None:
        """See Place. A replica whose canary failed is tried once more: its stable release answers."""
        prompt = fitted.prompt
        keys = self._prefixes.keys_of(prompt.token_ids, str(fitted.options.get("cache_salt", "")))
        replica = self._choose(keys, tried)
        if replica is None:
            return None
        target = replica.target(caller)
        canary = target is not None and replica.route is not None and target == replica.route.canary
        mark = f"{replica.name} canary"
        if canary and mark in tried and replica.route is not None:
            target, canary = replica.route.stable, False
        tried.add(mark if canary else replica.name)
        self._prefixes.learn(keys, replica.name)

        async def start() -> Generation:
            if await replica.known():
                tried.discard(replica.name)
                raise Overloaded(f"the releases of {replica.name} became known only now")
            asked, digest = prompt, target.digest if target else ""
            if prompt.made_by and prompt.digest != digest:  # another release may have another tokenizer
                asked = await self._tokenize_at(replica, target, prompt.text, prompt.options)
            version = str(target.version) if target else ""
            return replica.backend.generate(asked, fitted.options, request_id, fitted.work, version)

        info = replace(self.info, fingerprint=f"fp_{target.digest[:16]}") if target else self.info
        return Attempt(replica, start, info, str(target.version) if target else "")

    def _choose(self, keys: Sequence[bytes], tried: set[str]) -> Replica | None:
        """The replica for a prompt with these prefixes. One that is not ready is asked when no other is left."""
        left = [one for one in self.replicas if one.name not in tried and one.breaker.allows]
        left = [one for one in left if one.healthy] or left
        if not left:
            return None
        least = min(one.outstanding for one in left)
        near = {one.name: one for one in left if one.outstanding <= least + self._limits.affinity_slack}
        known = self._prefixes.find(keys)
        if known in near:
            return near[known]
        idle = [one for one in left if one.outstanding == least]
        self._turn += 1
        return idle[self._turn % len(idle)]

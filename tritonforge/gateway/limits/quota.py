"""What a tenant has used and may still use: requests by the minute, tokens by the minute and day, requests at once.

The service counts a request, reserves its tokens before the model is asked and settles with the real number afterwards.
Counters are kept by the `limits` library, in memory or in a Redis that several gateways share. A limit is never passed:
a reservation is added first and taken back when it was too much.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, Storage
from limits.aio.strategies import MovingWindowRateLimiter
from limits.errors import StorageError
from limits.storage import storage_from_string

from tritonforge.gateway.api.errors import ApiError, unavailable
from tritonforge.gateway.config import Tenant
from tritonforge.gateway.limits.redis_options import redis_options

MINUTE_S, DAY_S = 60, 86_400
_STORE_AWAY = "The store of the quotas cannot be reached."


@dataclass(frozen=True)
class Reservation:
    """Tokens taken from a tenant's windows until it is known how many were used: counter -> seconds it is kept."""

    tokens: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


def open_storage(url: str) -> Storage:
    """The store of `url`, `memory` or redis://...; nothing is connected yet."""
    if url == "memory":
        return MemoryStorage(wrap_exceptions=True)
    return storage_from_string(
        f"async+{url}", wrap_exceptions=True, implementation="redispy", key_prefix="tritonforge", **redis_options()
    )


class Quota:
    """The limits of all tenants. `clock` gives seconds since 1970; minutes and days of tokens are the clock's own."""

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._requests = MovingWindowRateLimiter(storage)
        self._clock = clock
        self._owed: list[tuple[str, int, int]] = []
        """Refunds that could not be written: counter, its seconds, tokens."""

    async def count_request(self, tenant: Tenant) -> dict[str, str]:
        """Count one request; the headers that tell what is left. Raises ApiError 429 when there were too many in 60 s.

        A request that is refused does not count.
        """
        limit = tenant.requests_per_minute
        if limit is None:
            return {}
        item = RateLimitItemPerMinute(limit)
        try:
            taken = await self._requests.hit(item, tenant.name)
            reset, remaining = await self._requests.get_window_stats(item, tenant.name)
        except StorageError:
            raise unavailable(_STORE_AWAY) from None
        seconds = max(0.0, reset - self._clock())
        headers = _headers("requests", limit, remaining, seconds)
        if not taken:
            raise _exceeded("requests", f"requests_per_minute is {limit}", seconds, headers)
        return headers

    async def reserve(self, tenant: Tenant, tokens: int) -> Reservation:
        """Take `tokens` from the tenant's minute and day. Raises ApiError 429 when a window has not so many left."""
        taken: dict[str, int] = {}
        try:
            while self._owed:
                await self._refund(*self._owed.pop())
            return await self._reserve(tenant, tokens, taken)
        except ApiError:
            await self._give_back(taken, tokens)
            raise

    async def _reserve(self, tenant: Tenant, tokens: int, taken: dict[str, int]) -> Reservation:
        """`taken` gets each counter that was taken from, also when a later one refuses."""
        now = self._clock()
        headers: dict[str, str] = {}
        windows = (("tokens_per_minute", MINUTE_S), ("tokens_per_day", DAY_S))
        for name, seconds in windows:
            limit = getattr(tenant, name)
            if limit is None:
                continue
            counter, left_s = f"{tenant.name}/{name}/{int(now // seconds)}", seconds - now % seconds
            total = await self._add(counter, seconds, tokens)
            taken[counter] = seconds
            told = _headers("tokens", limit, limit - total, left_s)
            if total > limit:
                told = _headers("tokens", limit, limit - total + tokens, left_s)
                raise _exceeded("tokens", f"{name} is {limit}, the request may need {tokens}", left_s, told)
            headers = headers or told
        return Reservation(tokens, taken, headers)

    async def settle(self, reservation: Reservation, used: int) -> None:
        """Replace the reserved tokens by those that were really used, in the windows that they were taken from.

        While the store is away, the difference is owed: it is written before the next reservation.
        """
        await self._give_back(reservation.counters, reservation.tokens - used)

    async def _give_back(self, counters: dict[str, int], tokens: int) -> None:
        for counter, seconds in counters.items() if tokens else ():
            with contextlib.suppress(ApiError):
                await self._refund(counter, seconds, tokens)

    async def _refund(self, counter: str, seconds: int, tokens: int) -> None:
        """Raises ApiError when the store is away. The refund is owed then, unless it may have been written already."""
        try:
            await self._storage.incr(counter, 2 * seconds, -tokens)
        except StorageError as error:
            if type(error.storage_error).__name__ != "TimeoutError":
                self._owed.append((counter, seconds, tokens))
            raise unavailable(_STORE_AWAY) from None

    async def _add(self, counter: str, seconds: int, tokens: int) -> int:
        """The counter's new value. It is named after its window, so a late refund never reaches the next one."""
        try:
            return await self._storage.incr(counter, 2 * seconds, tokens)
        except StorageError:
            raise unavailable(_STORE_AWAY) from None


def _headers(what: str, limit: int, remaining: int, reset_s: float) -> dict[str, str]:
    """As OpenAI names them; times are `1.5s`."""
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, remaining)),
        f"x-ratelimit-reset-{what}": f"{reset_s:.3g}s",
    }


def _exceeded(what: str, rule: str, retry_s: float, headers: dict[str, str]) -> ApiError:
    """429, as the OpenAI clients expect it."""
    code = "insufficient_quota" if "per_day" in rule else "rate_limit_exceeded"
    retry = {"Retry-After": str(max(1, math.ceil(retry_s)))}
    return ApiError(429, f"Rate limit reached: {rule}.", code, type=what, headers=headers | retry)

"""How many requests of a tenant are answered at once, in this process or over all gateways of one Redis.

A lease in Redis ends by itself when its gateway dies: it is a member of a sorted set, scored with the time at which it
runs out, and a living gateway renews it. The time is that of Redis, whatever the gateways' clocks say.
"""

import asyncio
import contextlib
import uuid
from collections import Counter
from typing import Protocol

from tritonforge.gateway.api.errors import unavailable
from tritonforge.gateway.limits.redis_options import redis_options

LEASE_S = 30
RENEW_S = 10.0

_NOW = "local now = tonumber(redis.call('TIME')[1])\n"
_ACQUIRE = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) then return 0 end
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[1]), ARGV[2])
redis.call('EXPIRE', KEYS[1], 2 * tonumber(ARGV[1]))
return 1
"""
)
_RENEW = (
    _NOW
    + """
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[1]), ARGV[2])
redis.call('EXPIRE', KEYS[1], 2 * tonumber(ARGV[1]))
"""
)


class Leases(Protocol):
    """Seats of tenants."""

    async def acquire(self, tenant: str, limit: int) -> str | None:
        """A lease, or None when `limit` are out."""

    async def release(self, tenant: str, lease: str) -> None:
        """Give it back."""

    async def close(self) -> None:
        """End what runs in the background."""


class MemoryLeases:
    """See Leases: of this process."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    async def acquire(self, tenant: str, limit: int) -> str | None:
        """See Leases."""
        if self._held[tenant] >= limit:
            return None
        self._held[tenant] += 1
        return tenant

    async def release(self, tenant: str, lease: str) -> None:
        """See Leases."""
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]

    async def close(self) -> None:
        """See Leases."""


class RedisLeases:
    """See Leases: of all gateways with this Redis. Make it inside the event loop."""

    def __init__(self, url: str) -> None:
        from redis import asyncio as redis

        self._redis = redis.from_url(url, **redis_options())
        self._errors = redis.RedisError
        self._acquire = self._redis.register_script(_ACQUIRE)
        self._renewal = self._redis.register_script(_RENEW)
        self._held: dict[str, str] = {}
        self._renewing = asyncio.create_task(self._renew())

    async def acquire(self, tenant: str, limit: int) -> str | None:
        """See Leases."""
        lease = uuid.uuid4().hex
        try:
            got = await self._acquire(keys=[_key(tenant)], args=[LEASE_S, lease, limit])
        except self._errors:
            raise unavailable("The store of the quotas cannot be reached.") from None
        if not got:
            return None
        self._held[lease] = tenant
        return lease

    async def release(self, tenant: str, lease: str) -> None:
        """See Leases. Without a connection it runs out by itself."""
        self._held.pop(lease, None)
        with contextlib.suppress(self._errors):
            await self._redis.zrem(_key(tenant), lease)

    async def close(self) -> None:
        """See Leases."""
        self._renewing.cancel()
        await self._redis.aclose()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self.renew()

    async def renew(self) -> None:
        """Keep what is held, also what Redis has lost meanwhile; one that was released while it was renewed is not."""
        for lease, tenant in tuple(self._held.items()):
            with contextlib.suppress(self._errors):
                if lease in self._held:
                    await self._renewal(keys=[_key(tenant)], args=[LEASE_S, lease])
                if lease not in self._held:
                    await self._redis.zrem(_key(tenant), lease)


def _key(tenant: str) -> str:
    return f"tritonforge:leases:{tenant}"


def open_leases(url: str) -> Leases:
    """Those of `url`, `memory` or redis://..."""
    return MemoryLeases() if url == "memory" else RedisLeases(url)

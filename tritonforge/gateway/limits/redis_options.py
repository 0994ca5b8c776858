"""How quotas and leases speak to Redis."""

from typing import Any

TIMEOUT_S = 2.0
"""A Redis that takes longer is away: no request waits for one that hangs."""


def redis_options() -> dict[str, Any]:
    """Options of a client of redis-py.

    A connection that broke is opened once more, but no command that ran out of time is sent again, which redis-py does
    from version 6 on: it may have been carried out, and a refund would be given twice.
    """
    from redis import ConnectionError as Broken
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    retry = Retry(NoBackoff(), 1, supported_errors=(Broken,))
    return {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S, "retry": retry}

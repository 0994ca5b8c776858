"""Takes from a tenant's limits, and gives back, so that a request that is cancelled meanwhile keeps nothing of them."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Taken = TypeVar("Taken")


async def take(taking: Coroutine[Any, Any, Taken], give_back: Callable[[Taken], Awaitable[None]]) -> Taken:
    """What `taking` returns. A command that a store has got cannot be called back: who is cancelled while it runs waits
    for its end, gives back what it took, and is cancelled then.
    """
    task = asyncio.ensure_future(taking)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await give_back(await task)
        raise


async def to_the_end(work: Coroutine[Any, Any, Taken]) -> Taken:
    """What `work` returns. Who is cancelled meanwhile waits for its end first; a second time ends it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise

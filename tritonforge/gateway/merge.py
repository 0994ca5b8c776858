"""Several asynchronous iterators as one. The exchange merges the answers to several prompts with it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


async def merge(sources: Sequence[AsyncIterator[Item]]) -> AsyncIterator[Item]:
    """The items of all `sources` as they come, in order within a source; an exception of one ends all.

    A source waits until its item was taken, so nothing gathers.
    """
    if len(sources) == 1:
        async for item in sources[0]:
            yield item
        return
    queue: asyncio.Queue = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_pump(source, queue)) for source in sources]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is _END:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: AsyncIterator[Item], queue: asyncio.Queue) -> None:
    try:
        async for item in source:
            await queue.put(item)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(_END)

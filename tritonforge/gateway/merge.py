"""Several asynchronous generators as one. The exchange merges the answers to several prompts with it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def merge(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """The items of all `sources` as they come, in order within a source; an exception of one ends all.

    A source waits until its item was taken, so nothing gathers. All are closed when this is.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield item
        return
    reading = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = reading.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield item
                reading[asyncio.ensure_future(anext(source))] = source
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await asyncio.gather(*(source.aclose() for source in sources), return_exceptions=True)

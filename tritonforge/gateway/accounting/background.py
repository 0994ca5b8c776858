"""Writes records in a thread of its own, so that a slow disk delays no answer. The audit and the usage do."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Item = TypeVar("Item")
MOST_WAITING = 100_000
"""Beyond that the newest are lost, which is counted and logged: memory has an end."""
BATCH = 512


class Background(Generic[Item]):
    """Hands items to `write`, in order, as many at once as there are. `lost` is told how many could not be written."""

    def __init__(self, name: str, write: Callable[[list[Item]], None], lost: Callable[[int], None]) -> None:
        self._name, self._write, self._lost = name, write, lost
        self._queue: queue.Queue[Item | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Write it soon; never waits."""
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._lose(1, "its queue is full")

    def close(self) -> None:
        """Write what is left, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        ended = False
        while not ended:
            items = [self._queue.get()]
            while len(items) < BATCH and not self._queue.empty():
                items.append(self._queue.get_nowait())
            ended = None in items
            self._write_now([item for item in items if item is not None])

    def _write_now(self, items: list[Item]) -> None:
        if not items:
            return
        try:
            self._write(items)
        except Exception as error:  # a full disk must not end the gateway
            self._lose(len(items), str(error))

    def _lose(self, count: int, why: str) -> None:
        self._lost(count)
        log.error("%s: %d records were lost: %s", self._name, count, why)

"""Writes records in a thread of its own, so that a slow disk delays no answer. The audit and the usage do."""

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Item = TypeVar("Item")
MOST_WAITING = 100_000
"""Beyond that the newest are lost, which is counted and logged: memory has an end."""
BATCH = 512
IDLE_S = 600.0
"""So often `write` is called with nothing: what is too old is removed where nobody asks any more, too."""
FIRST_WAIT_S, MOST_WAIT_S, LAST_WAIT_S = 0.5, 30.0, 0.1
CLOSE_S = 10.0
"""How long close() waits for a disk that takes nothing."""
PASSES = (OSError, sqlite3.OperationalError)
"""Errors that may pass: a full disk, a file that somebody else holds. Any other is the fault of a record."""


class Background(Generic[Item]):
    """Hands items to `write`, in order, as many at once as there are; `write` takes all of them, or raises and none.

    What cannot be written is tried again until it can, while others wait. `lost` is told how many never were.
    """

    def __init__(self, name: str, write: Callable[[list[Item]], None], lost: Callable[[int], None]) -> None:
        self._name, self._write, self._lost = name, write, lost
        self._queue: queue.Queue[Item | None] = queue.Queue(MOST_WAITING)
        self._closed = threading.Event()
        self._ends = 0.0
        self._refused_since: float | None = None
        self._unwritten = 0
        self._full = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Write it soon; never waits."""
        if self._closed.is_set():
            self._lose(1, "it was closed before")
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._lost(1)
            if not self._full:  # said once: a line for each would fill the disk as well
                log.error("%s: its queue is full; the newest records are lost until it can be written", self._name)
            self._full = True
        else:
            self._full = False

    @property
    def delay_s(self) -> float:
        """For how long nothing can be written; 0 when it can."""
        since = self._refused_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Write what is left, for up to CLOSE_S, and end. May be called again."""
        if self._closed.is_set():
            return
        self._ends = time.monotonic() + CLOSE_S / 2
        self._closed.set()
        try:
            self._queue.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        except queue.Full:
            pass
        left = self._unwritten + self._queue.qsize()
        if self._thread.is_alive() and left:
            self._lose(left, "it could not be written before the end")

    def _run(self) -> None:
        ended = False
        while not ended:
            items = self._next()
            ended = None in items
            found = [item for item in items if item is not None]
            self._unwritten = len(found)
            self._write_all(found)
            self._unwritten = 0

    def _next(self) -> list[Item | None]:
        try:
            items = [self._queue.get(timeout=IDLE_S)]
        except queue.Empty:
            return []
        while len(items) < BATCH and not self._queue.empty():
            items.append(self._queue.get_nowait())
        return items

    def _write_all(self, items: list[Item]) -> None:
        """All at once; where a record is at fault, each by itself, so that only that one is lost."""
        try:
            self._write_when_possible(items)
        except PASSES as error:
            self._lose(len(items), str(error))
        except Exception as error:
            if len(items) > 1:
                for item in items:
                    self._write_all([item])
            elif items:
                self._lose(1, str(error))

    def _write_when_possible(self, items: list[Item]) -> None:
        """Try until it is written. Raises what does not pass, and anything once the end has come."""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                self._write(items)
                self._refused_since = None
                return
            except PASSES as error:
                self._refused_since = self._refused_since or time.monotonic()
                if self._closed.is_set() and time.monotonic() >= self._ends:
                    raise
                log.error("%s: %d records cannot be written, and are tried again: %s", self._name, len(items), error)
            if self._closed.wait(wait_s):
                time.sleep(LAST_WAIT_S)
            wait_s = min(2 * wait_s, MOST_WAIT_S)

    def _lose(self, count: int, why: str) -> None:
        self._lost(count)
        log.error("%s: %d records were lost: %s", self._name, count, why)

"""The Emitter: one thread that runs what is posted once it is due. Streams send through it; no step waits for one."""

import heapq
import logging
import threading
import time
from collections.abc import Callable
from itertools import count

log = logging.getLogger(__name__)

FLUSH_S = 30.0
"""How long stop() waits for what is pending to be sent."""


class Emitter:
    """Runs actions in the order in which they are due. After stop() the poster's own thread runs them: none is lost."""

    def __init__(self) -> None:
        self._actions: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = count()  # equally due actions run in the order they were posted
        self._posted = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="emitter", daemon=True)
        self._thread.start()

    def post(self, action: Callable[[], None], due_ns: int = 0) -> None:
        """Run `action` at `due_ns` of time.monotonic_ns(), or as soon after as its turn comes; it must not raise."""
        with self._posted:
            if not self._stopped:
                entry = (due_ns, next(self._numbers), action)
                heapq.heappush(self._actions, entry)
                if self._actions[0] is entry:
                    self._posted.notify()
                return
        action()

    def stop(self, timeout_s: float = FLUSH_S) -> None:
        """Run all that was posted, due or not, for up to `timeout_s`, and end the thread."""
        with self._posted:
            self._stopped = True
            self._posted.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Exception:
                log.exception("an emitter action failed")

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next action that is due; None when there will be none."""
        with self._posted:
            while not self._stopped:
                wait_ns = self._actions[0][0] - time.monotonic_ns() if self._actions else None
                if wait_ns is not None and wait_ns <= 0:
                    break
                self._posted.wait(None if wait_ns is None else wait_ns / 1e9)
            return heapq.heappop(self._actions)[2] if self._actions else None

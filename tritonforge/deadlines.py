"""When requests must have started and ended, and when to come back: what the engine loop knows of time limits. Pure."""

import heapq
import math
from collections import deque

from tritonforge.errors import DeadlineExceeded, Overloaded, TritonForgeError
from tritonforge.generation import Generation

WINDOW_NS = 30 * 10**9
"""Ends of requests that are older say nothing about how fast the queue moves."""
MOST_RETRY_S = 60


class Deadlines:
    """The requests with a time limit, the next one due first."""

    def __init__(self) -> None:
        self._due: list[tuple[int, int, Generation]] = []

    def watch(self, generation: Generation) -> None:
        """Remember the limits of a request, if it has any."""
        asked, arrived = generation.asked, generation.timeline.arrived_ns
        for timeout_ms in (asked.queue_timeout_ms, asked.timeout_ms):
            if timeout_ms is not None:
                heapq.heappush(self._due, (arrived + timeout_ms * 1_000_000, generation.key, generation))

    def missed(self, now_ns: int) -> list[tuple[Generation, TritonForgeError]]:
        """The unfinished requests that missed a limit by `now_ns`, each with the error that says which one."""
        missed = {}
        while self._due and self._due[0][0] <= now_ns:
            _, key, generation = heapq.heappop(self._due)
            error = _why(generation, now_ns) if generation.unfinished else None
            if error is not None:
                missed[key] = (generation, error)
        return list(missed.values())


def _why(generation: Generation, now_ns: int) -> TritonForgeError | None:
    asked, timeline = generation.asked, generation.timeline
    waited_ms = (now_ns - timeline.arrived_ns) // 1_000_000
    if asked.timeout_ms is not None and waited_ms >= asked.timeout_ms:
        return DeadlineExceeded(
            f"not answered within timeout_ms {asked.timeout_ms}: {waited_ms} ms have passed and "
            f"{generation.statistics(now_ns)['completion_tokens']} tokens were generated"
        )
    if asked.queue_timeout_ms is not None and timeline.scheduled_ns is None:
        return Overloaded(f"not started within queue_timeout_ms {asked.queue_timeout_ms}: waited {waited_ms} ms")
    return None


class RetryAfter:
    """Estimates, from how fast requests ended lately, when one that is refused now would find room."""

    def __init__(self) -> None:
        self._ends_ns: deque[int] = deque(maxlen=1000)

    def ended(self, now_ns: int) -> None:
        """A request has ended."""
        self._ends_ns.append(now_ns)

    def seconds(self, num_waiting: int, now_ns: int) -> int:
        """Whole seconds, at least 1, until as many requests as wait now will have ended; 1 when none ended lately."""
        recent = [end for end in self._ends_ns if now_ns - end <= WINDOW_NS]
        if not recent:
            return 1
        rate = len(recent) / max((now_ns - recent[0]) / 1e9, 1.0)
        return max(1, min(MOST_RETRY_S, math.ceil(num_waiting / rate)))

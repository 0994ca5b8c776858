"""A circuit breaker: keeps requests away from a place that keeps failing, and lets one try after a while. Pure.

The libraries for it wrap a call, and let everybody in who waits when it is time to try; here an outcome is known with
the first token of a stream, whose end may still be a failure, and only one request is risked.
"""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass

from tritonforge.errors import InvalidRequest


class State(enum.IntEnum):
    """Closed: all pass; open: nobody; half open: one does, to see."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True)
class BreakerPolicy:
    """It opens after so many failures in a row, for `open_s` seconds; twice as long each time that a try fails."""

    failures: int = 3
    open_s: float = 2.0
    most_open_s: float = 60.0

    def __post_init__(self) -> None:
        if type(self.failures) is not int or self.failures < 1:
            raise InvalidRequest(f"failures of a breaker must be an integer of 1 or more, got {self.failures!r}")
        for name in ("open_s", "most_open_s"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise InvalidRequest(f"{name} of a breaker must be a number of seconds above 0, got {value!r}")


@dataclass(frozen=True, slots=True)
class Pass:
    """What a request that was let in gives back with its outcome."""

    era: int
    trial: bool


class CircuitBreaker:
    """One place's breaker. `clock` gives seconds that only grow."""

    def __init__(self, policy: BreakerPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self._failures = 0
        self._era = 0
        self._opened_at: float | None = None
        self._open_s = policy.open_s
        self._trying = False

    @property
    def state(self) -> State:
        """Its state now."""
        if self._opened_at is None:
            return State.CLOSED
        return State.OPEN if self._clock() - self._opened_at < self._open_s else State.HALF_OPEN

    @property
    def allows(self) -> bool:
        """Whether `enter` would let somebody in."""
        state = self.state
        return state is State.CLOSED or (state is State.HALF_OPEN and not self._trying)

    def enter(self) -> Pass:
        """Let a request in; only while it `allows`. Tell its outcome with `succeeded`, `failed` or `left`.

        A stream may tell that it `began` before that.
        """
        trial = self.state is State.HALF_OPEN
        self._trying = self._trying or trial
        return Pass(self._era, trial)

    def began(self, given: Pass) -> Pass:
        """Its first token is there: closed again, if this was the try. Returns the pass to tell the outcome with.

        Failures in a row are only forgotten when an answer ends well: a place whose answers all break off is broken.
        """
        if given.era != self._era or not given.trial:
            return given
        self._change(None, self._policy.open_s)
        return Pass(self._era, False)

    def succeeded(self, given: Pass) -> None:
        """It answered to the end."""
        given = self.began(given)
        if given.era == self._era:  # else it was let in before it opened: says nothing of how it is now
            self._failures = 0

    def failed(self, given: Pass) -> None:
        """It did not answer, or not to the end."""
        if given.era != self._era:
            return
        self._failures += 1
        if given.trial:
            self._change(self._clock(), min(2 * self._open_s, self._policy.most_open_s))
        elif self._failures >= self._policy.failures:
            self._change(self._clock(), self._policy.open_s)

    def left(self, given: Pass) -> None:
        """The request went away before an outcome: the next one may try."""
        if given.trial and given.era == self._era:
            self._trying = False

    def _change(self, opened_at: float | None, open_s: float) -> None:
        self._opened_at, self._open_s = opened_at, open_s
        self._era += 1
        self._failures, self._trying = 0, False

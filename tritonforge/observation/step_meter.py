"""StepMeter: what the engine loop's steps took and held. The loop's thread writes it; metrics and watchdog read it.

It costs about a microsecond a request and step: it counts into buckets, and is told to Triton once a second.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tritonforge.observation.metric_family import Bins
from tritonforge.scheduling.request import StepPlan

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class StepMeter:
    """Counts every step that computed something; `busy_since_ns` is when the loop's thread took up what it is doing.

    `busy_since_ns` is None while there is nothing to do; it moves on with each step, so its age is how long the present
    step has taken. Times are nanoseconds of the monotonic clock.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._began_ns = 0
        self._engine_ns = 0
        self.busy_since_ns: int | None = None
        self.last_token_ns: int | None = None
        self.step_seconds = Bins(SECONDS)
        self.outside_engine = Bins(SHARES)
        self.step_requests = Bins(COUNTS)
        self.step_tokens = Bins(COUNTS)
        self.inter_token = Bins(SECONDS)

    def use_buckets(self, name: str, bounds: Sequence[float]) -> None:
        """Other bounds for the attribute `name`; to be called before the first step."""
        setattr(self, name, Bins(bounds))

    def rest(self) -> None:
        """There is nothing to do, for now or for ever."""
        self.busy_since_ns = None

    @contextmanager
    def resting(self) -> Iterator[None]:
        """There is nothing to do inside the block; something is taken up after it: messages, then perhaps a step."""
        self.rest()
        yield
        self.busy_since_ns = self._clock_ns()

    def begin(self) -> None:
        """A step begins."""
        self._began_ns = self.busy_since_ns = self._clock_ns()
        self._engine_ns = 0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The engine computes inside the block."""
        since_ns = self._clock_ns()
        yield
        self._engine_ns += self._clock_ns() - since_ns

    def token(self, gap_ns: int | None) -> None:
        """A request got tokens, `gap_ns` after those before; None: its first."""
        if gap_ns is not None:
            self.inter_token.add(gap_ns / 1e9)

    def end(self, plan: StepPlan, *, sampled: bool) -> None:
        """The step has ended; `sampled` when it brought a token to anybody."""
        now = self._clock_ns()
        took = now - self._began_ns
        self.step_seconds.add(took / 1e9)
        if took > 0:
            self.outside_engine.add(1 - self._engine_ns / took)
        self.step_requests.add(len(plan.work))
        self.step_tokens.add(plan.num_tokens)
        if sampled:
            self.last_token_ns = now

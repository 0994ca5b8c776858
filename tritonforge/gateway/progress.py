"""What the answers of one request have become so far: through the filters, to the client, and into the record."""

import time
from collections.abc import Sequence

from tritonforge.gateway.answers import Gain
from tritonforge.gateway.api.errors import unavailable
from tritonforge.gateway.edge import AnswerFilter
from tritonforge.gateway.runs import Run

CONTENT_FILTER = "content_filter"


class Progress:
    """The exchange makes one for each request and shows it every gain."""

    def __init__(self) -> None:
        self._arrived = time.perf_counter()
        self._ended: dict[int, str] = {}
        """Answers that are over: their reasons."""
        self._filters: Sequence[AnswerFilter] = ()
        self._n = 1
        self._keep = False
        self.first_token_ms: float | None = None
        self.reasons: list[str] = []
        self.answers: dict[int, str] = {}
        self.filtered: dict[str, None] = {}

    def begin(self, filters: Sequence[AnswerFilter], n: int, *, keep: bool) -> None:
        """Each run has `n` answers, which go through `filters`; their texts are kept if `keep`."""
        self._filters, self._n, self._keep = filters, n, keep

    def elapsed_ms(self) -> float:
        """Since the request arrived."""
        return (time.perf_counter() - self._arrived) * 1e3

    def note(self, what: str) -> None:
        """See edge.Note."""
        self.filtered[what] = None

    async def see(self, run: Run, gain: Gain) -> Gain | None:
        """What is told of `gain`; None once its answer has ended. Raises ApiError."""
        if self.first_token_ms is None and (gain.token_ids or gain.text):
            self.first_token_ms = self.elapsed_ms()
        if gain.index in self._ended:
            return None
        if gain.finish_reason == "cancelled":
            raise unavailable("The answer was cancelled by the server.")
        for one in self._filters:
            gain = await one.push(gain)
        if gain.finish_reason:
            self._end(run, gain)
        if self._keep:
            self.answers[gain.index] = self.answers.get(gain.index, "") + gain.text
        return gain

    def _end(self, run: Run, gain: Gain) -> None:
        """An answer is over; a run is when all its answers are and a filter ended one: its model writes on in vain."""
        self.reasons.append(gain.finish_reason or "")
        self._ended[gain.index] = gain.finish_reason or ""
        ended = [self._ended.get(run.offset + place) for place in range(self._n)]
        run.complete = None not in ended and CONTENT_FILTER in ended

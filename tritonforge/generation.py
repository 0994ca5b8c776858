"""One request on its way through the engine loop, and the deltas that its answer is made of."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tritonforge.errors import TritonForgeError
from tritonforge.request import FinishReason, GenerateRequest, Request
from tritonforge.text import Decode, TextStream
from tritonforge.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Delta:
    """What a request's answer gained. A final one has a finish reason; `error` says why when that is ERROR.

    The text of a token may come with a later delta: while a character is unfinished, or could begin a stop string.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: TritonForgeError | None = None

    @property
    def final(self) -> bool:
        """Whether the answer ends here."""
        return self.finish_reason is not None


class Outbox:
    """Deltas on their way from the loop's thread, which puts, to the thread that sends them, which takes."""

    def __init__(self) -> None:
        self._deltas: deque[Delta] = deque()

    def put(self, delta: Delta) -> None:
        """Add the next delta; never blocks."""
        self._deltas.append(delta)

    def take_all(self) -> list[Delta]:
        """All deltas put so far, in order; one that is put meanwhile comes now or with the next call, never twice."""
        taken = []
        while True:
            try:
                taken.append(self._deltas.popleft())
            except IndexError:
                return taken


Sink = Callable[["Generation", Delta], None]
"""Takes a delta off the loop's hands at once; it is called by the loop's thread and must not block."""


class Generation:
    """One request on its way through the loop: what was asked, its scheduler state, its text and its times."""

    def __init__(self, asked: GenerateRequest, request: Request, decode: Decode, sink: Sink, now_ns: int) -> None:
        self.key = request.key
        self.asked = asked
        self.request = request
        self.text = TextStream(decode, asked.stop)
        self.timeline = Timeline(now_ns)
        self.sink = sink

    def statistics(self, now_ns: int) -> dict[str, int]:
        """Usage, phase durations and counts under their contract names, as of `now_ns`."""
        return {
            "prompt_tokens": len(self.request.prompt_ids),
            "completion_tokens": len(self.request.output_ids),
            "cached_tokens": self.request.num_cached_tokens,
            **self.timeline.phases_us(now_ns),
            "decode_steps": self.timeline.decode_steps,
            "preemptions": self.request.preemptions,
        }

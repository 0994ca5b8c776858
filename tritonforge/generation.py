"""One request on its way through the engine loop, and the deltas that its answers are made of."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tritonforge.answer import Answer
from tritonforge.errors import TritonForgeError
from tritonforge.generate_request import GenerateRequest
from tritonforge.sampling.sampling import Drawn
from tritonforge.scheduling.request import FinishReason
from tritonforge.structured.tool_calls import ToolCall
from tritonforge.timeline import Timeline


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """What a request asked to be told of its prompt; `logprobs` are those of tokens 1, 2, ... (None: not asked)."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Drawn, ...] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What answer `index` of a request gained; `finish_reason` when it ended, `final` when all answers have.

    `drawn` are the new tokens with their log-probabilities. The text of a token may come with a later delta: while a
    character is unfinished, or could begin a stop string. `tool_calls` come with the end of an answer whose request has
    tools. An `error` ends all answers.
    """

    text: str = ""
    drawn: tuple[Drawn, ...] = ()
    finish_reason: FinishReason | None = None
    index: int = 0
    final: bool = False
    prompt: PromptEcho | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    error: TritonForgeError | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the new tokens."""
        return tuple(drawn.token_id for drawn in self.drawn)


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
    """One request on its way through the loop: what was asked, its answers and its times.

    The first answer computes the prompt; the others are `unforked` until it has, and then share its KV blocks.
    """

    def __init__(self, asked: GenerateRequest, answers: list[Answer], sink: Sink, now_ns: int) -> None:
        self.key = answers[0].request.key
        self.asked = asked
        self.answers = answers
        self.unforked = answers[1:]
        self.timeline = Timeline(now_ns)
        self.sink = sink

    @property
    def unfinished(self) -> list[Answer]:
        """The answers that have not ended."""
        return [answer for answer in self.answers if answer.finish_reason is None]

    def take_unforked(self) -> list[Answer]:
        """The answers that do not share the prompt yet, once; call it when the prompt is computed."""
        unforked, self.unforked = self.unforked, []
        return unforked

    def refuse(self, error: TritonForgeError) -> None:
        """Answer with `error` a request that nobody has taken in."""
        for answer in self.answers:
            answer.finish_reason = FinishReason.ERROR
        self.sink(self, Delta(finish_reason=FinishReason.ERROR, final=True, error=error))

    def echo(self, answer: Answer) -> PromptEcho | None:
        """What to tell of the prompt before the first token of `answer`; log-probabilities with the first one only."""
        asked = self.asked
        told = answer.index == 0 and asked.prompt_logprobs is not None
        if not (asked.echo or told):
            return None
        text = answer.decode(asked.prompt_ids) if asked.echo else ""
        return PromptEcho(text, asked.prompt_ids, tuple(answer.prompt_logprobs) if told else None)

    def statistics(self, now_ns: int) -> dict[str, int]:
        """Usage, phase durations and counts under their contract names, as of `now_ns`."""
        requests = [answer.request for answer in self.answers]
        return {
            "prompt_tokens": len(self.asked.prompt_ids),
            "completion_tokens": sum(answer.num_told_tokens for answer in self.answers),
            "cached_tokens": requests[0].num_cached_tokens,
            **self.timeline.phases_us(now_ns),
            "decode_steps": self.timeline.decode_steps,
            "preemptions": sum(request.preemptions for request in requests),
            "draft_tokens": self.timeline.draft_tokens,
            "accepted_tokens": self.timeline.accepted_tokens,
            "truncated_tokens": self.asked.truncated_tokens,
        }

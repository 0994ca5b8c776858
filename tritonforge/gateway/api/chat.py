"""Chat completions as OpenAI writes them: what gains become, streamed in chunks or as one object. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tritonforge.gateway.answers import Gain, chat_logprobs
from tritonforge.gateway.api.replies import Reply, Usage
from tritonforge.gateway.api.tools import CallReader
from tritonforge.structured.tool_calls import ToolCall


@dataclass
class _Choice:
    """One answer so far."""

    reader: CallReader | None
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    begun: bool = False


class ChatReply(Reply):
    """See Reply."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        tools = self.work.tools
        self._choices = [_Choice(None if tools is None else CallReader(tools)) for _ in range(self.work.n)]

    def chunks(self, gains: Sequence[Gain]) -> list[dict[str, Any]]:
        """See Reply."""
        return [self.chunk([told]) for gain in gains for told in self._told(gain)]

    def _told(self, gain: Gain) -> list[dict[str, Any]]:
        """The chunk choices of one gain: role first, then what came, then the reason of the end."""
        choice = self._choices[gain.index]
        begun, choice.begun = choice.begun, True
        text, calls, logprobs = self._push(choice, gain)
        told = []
        if not begun:
            told.append(self._delta(gain.index, {"role": "assistant", "content": ""}))
        if text or logprobs:
            one = self._delta(gain.index, {"content": text})
            told.append(one | {"logprobs": {"content": logprobs, "refusal": None} if logprobs else None})
        if calls:
            numbered = [{"index": place} | _call(call) for place, call in enumerate(calls)]
            told.append(self._delta(gain.index, {"tool_calls": numbered}))
        if choice.finish_reason:
            told.append(self._delta(gain.index, {}, choice.finish_reason))
        return told

    def _delta(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def push(self, gains: Sequence[Gain]) -> None:
        """See Reply."""
        for gain in gains:
            self._push(self._choices[gain.index], gain)

    def _push(self, choice: _Choice, gain: Gain) -> tuple[str, tuple[ToolCall, ...], list[dict[str, Any]]]:
        text, calls = gain.text, ()
        if choice.reader is not None:
            text, calls = choice.reader.push(text, final=gain.finish_reason is not None, native=gain.calls)
        logprobs = chat_logprobs(gain.scored, self.texts) if gain.scored else []
        choice.text += text
        choice.calls += calls
        choice.logprobs += logprobs
        if gain.finish_reason:
            choice.finish_reason = "tool_calls" if calls and gain.finish_reason == "stop" else gain.finish_reason
        return text, calls, logprobs

    def body(self, usage: Usage) -> dict[str, Any]:
        """See Reply."""
        return self.envelope(self.kind, [self._whole(index, one) for index, one in enumerate(self._choices)], usage)

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": [_call(call) for call in choice.calls]}
        logprobs = None if self.work.top_logprobs is None else {"content": choice.logprobs, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

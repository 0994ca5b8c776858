"""Completions as OpenAI writes them: what gains become, streamed in chunks or as one object. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritonforge.gateway.answers import Gain, completion_logprobs
from tritonforge.gateway.api.replies import Reply, Usage

_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass
class _Choice:
    """One answer so far; `offset` is where the text of its next token begins."""

    text: str = ""
    offset: int = 0
    logprobs: dict[str, list] | None = None
    finish_reason: str | None = None


class CompletionReply(Reply):
    """See Reply."""

    kind, chunk_kind = "text_completion", "text_completion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._choices = [_Choice() for _ in range(self.work.n * len(self.work.prompts))]

    def chunks(self, gains: Sequence[Gain]) -> list[dict[str, Any]]:
        """See Reply."""
        told = [self._told(gain, self._push(gain)) for gain in gains]
        return [self.chunk([one]) for one in told if one["text"] or one["logprobs"] or one["finish_reason"]]

    def _told(self, gain: Gain, logprobs: dict[str, list] | None) -> dict[str, Any]:
        return {"index": gain.index, "text": gain.text, "logprobs": logprobs, "finish_reason": gain.finish_reason}

    def push(self, gains: Sequence[Gain]) -> None:
        """See Reply."""
        for gain in gains:
            self._push(gain)

    def _push(self, gain: Gain) -> dict[str, list] | None:
        choice = self._choices[gain.index]
        choice.text += gain.text
        choice.finish_reason = gain.finish_reason or choice.finish_reason
        scored = (*gain.prompt, *gain.scored)
        if not scored:
            return None
        told, choice.offset = completion_logprobs(scored, self.texts, choice.offset)
        so_far = choice.logprobs or {name: [] for name in _LISTS}
        choice.logprobs = {name: so_far[name] + told[name] for name in _LISTS}
        return told

    def body(self, usage: Usage) -> dict[str, Any]:
        """See Reply."""
        choices = [
            {"index": index, "text": one.text, "logprobs": one.logprobs, "finish_reason": one.finish_reason}
            for index, one in enumerate(self._choices)
        ]
        return self.envelope(self.kind, choices, usage)

"""Events of an OpenAI-compatible stream as the chunks that our decoder would have sent. Pure."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tritonforge import contract
from tritonforge.client import Chunk
from tritonforge.errors import TritonForgeError
from tritonforge.structured.tool_calls import ToolCall

BYTES_PER_TOKEN = 3
"""What tokens are estimated by where nobody counted them, on the careful side."""
REASONS = {"stop": "stop", "length": "length", "tool_calls": "stop", "content_filter": "content_filter"}


class ChunkReader:
    """Reads one stream. Calls are gathered, as the decoder tells them: whole, with the end of their answer."""

    def __init__(self, prompt_tokens: int = 0) -> None:
        """`prompt_tokens` is an estimate, for a stream that does not tell."""
        self._prompt_tokens, self._bytes = prompt_tokens, 0
        self._calls: dict[int, dict[int, dict[str, str]]] = {}
        self._open: set[int] = set()
        self.begun = False
        self._usage: dict[str, Any] = {}

    def push(self, event: dict[str, Any]) -> Iterator[Chunk]:
        """The chunks of one event: those with text, and those that end an answer. Raises TritonForgeError."""
        try:
            yield from self._read(event)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise TritonForgeError("the managed API sent an event that is not of OpenAI's form") from None

    def _read(self, event: dict[str, Any]) -> Iterator[Chunk]:
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            index, delta = choice.get("index") or 0, choice.get("delta", choice) or {}
            self._gather(index, delta.get("tool_calls") or ())
            text, reason = delta.get("content") or delta.get("text") or "", choice.get("finish_reason")
            self.begun = True
            self._bytes += len(text.encode("utf-8", "surrogatepass"))
            (self._open.discard if reason else self._open.add)(index)
            if text or reason:
                yield self._chunk(index, text, REASONS.get(reason, "stop") if reason else "")

    def last(self) -> Chunk:
        """The chunk with the usage. Raises TritonForgeError when the stream ended before its answers did."""
        if self._open or not self.begun:
            raise TritonForgeError("the stream of the managed API ended without a final answer")
        return Chunk("", (), statistics=self.statistics())

    def statistics(self) -> dict[str, int]:
        """What the API counted; else, and for a stream that was left, what is estimated of what came."""
        estimated = {"prompt_tokens": self._prompt_tokens, "completion_tokens": -(-self._bytes // BYTES_PER_TOKEN)}
        told = self._usage if isinstance(self._usage, dict) else {}
        details = told.get("prompt_tokens_details")
        counts = {name: _count(told.get(name), estimated[name]) for name in estimated}
        cached = _count(details.get("cached_tokens"), 0) if isinstance(details, dict) else 0
        return counts | {"cached_tokens": min(cached, counts["prompt_tokens"])}

    def _gather(self, index: int, deltas: Any) -> None:
        calls = self._calls.setdefault(index, {})
        for delta in deltas:
            call = calls.setdefault(delta.get("index", 0), {"id": "", "name": "", "arguments": ""})
            function = delta.get("function") or {}
            call["id"] = delta.get("id") or call["id"]
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""
            self._bytes += len((function.get("name") or "") + (function.get("arguments") or ""))

    def _chunk(self, index: int, text: str, reason: str) -> Chunk:
        outputs: dict[str, tuple] = {
            contract.TEXT_OUTPUT.name: (text,),
            contract.FINISH_REASON.name: (reason,),
            contract.INDEX.name: (index,),
            contract.TOKEN_COUNTS.name: (0,),
        }
        found = [ToolCall(**call) for _, call in sorted(self._calls[index].items())]
        if reason and found:
            outputs[contract.TOOL_CALLS.name] = (json.dumps([asdict(call) for call in found]),)
        return Chunk(text, (), reason or None, outputs=outputs)


def _count(told: Any, otherwise: int) -> int:
    return told if type(told) is int and told >= 0 else otherwise

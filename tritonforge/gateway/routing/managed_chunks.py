"""Events of an OpenAI-compatible stream as the chunks that our decoder would have sent. Pure."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tritonforge import contract
from tritonforge.client import Chunk
from tritonforge.errors import TritonForgeError
from tritonforge.structured.tool_calls import ToolCall

REASONS = {"stop": "stop", "length": "length", "tool_calls": "stop", "content_filter": "content_filter"}


class ChunkReader:
    """Reads one stream. Calls are gathered, as the decoder tells them: whole, with the end of their answer."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[int, dict[str, str]]] = {}
        self._open: set[int] = set()
        self._begun = False
        self._usage: dict[str, Any] = {}

    def push(self, event: dict[str, Any]) -> Iterator[Chunk]:
        """The chunks of one event: those with text, and those that end an answer."""
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            index, delta = choice.get("index", 0), choice.get("delta", choice)
            self._gather(index, delta.get("tool_calls") or ())
            text, reason = delta.get("content") or delta.get("text") or "", choice.get("finish_reason")
            self._begun = True
            (self._open.discard if reason else self._open.add)(index)
            if text or reason:
                yield self._chunk(index, text, REASONS.get(reason, "stop") if reason else "")

    def last(self) -> Chunk:
        """The chunk with the usage. Raises TritonForgeError when the stream ended before its answers did."""
        if self._open or not self._begun:
            raise TritonForgeError("the stream of the managed API ended without a final answer")
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        told = {name: int(self._usage.get(name, 0)) for name in ("prompt_tokens", "completion_tokens")}
        return Chunk("", (), statistics=told | {"cached_tokens": cached})

    def _gather(self, index: int, deltas: Any) -> None:
        calls = self._calls.setdefault(index, {})
        for delta in deltas:
            call = calls.setdefault(delta.get("index", 0), {"id": "", "name": "", "arguments": ""})
            function = delta.get("function") or {}
            call["id"] = delta.get("id") or call["id"]
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""

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

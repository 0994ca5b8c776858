"""What both kinds of answers have in common: the envelope, the chunks of a stream, the usage."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tritonforge.gateway.answers import Gain, TokenTexts
from tritonforge.gateway.routing.router import ModelInfo
from tritonforge.gateway.work import Work


@dataclass(frozen=True)
class Usage:
    """Tokens of one request, as the decoder counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def told(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Reply(ABC):
    """The answers to one request, as they come. Use `chunks` for a stream, or `push` and then `body`.

    `info` is the model that answers; who reads the answers sets it anew when that is another one than was asked.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, work: Work, info: ModelInfo, reply_id: str, created: int) -> None:
        self.work, self.info, self._id, self._created = work, info, reply_id, created

    @property
    def texts(self) -> TokenTexts:
        """Texts of tokens; a request that needs them was refused when there are none."""
        assert self.info.tokens is not None
        return self.info.tokens

    @abstractmethod
    def chunks(self, gains: Sequence[Gain]) -> list[dict[str, Any]]:
        """The chunks of a stream that tell these gains."""

    @abstractmethod
    def push(self, gains: Sequence[Gain]) -> None:
        """Keep these gains for the body."""

    @abstractmethod
    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream; with include_usage every one says that the usage is still to come."""
        return self.envelope(self.chunk_kind, choices, None)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream with include_usage."""
        return self.envelope(self.chunk_kind, [], usage)

    def envelope(self, kind: str, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        """The object around choices; a completions request has no service tier."""
        told: dict[str, Any] = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.work.model,
            "choices": choices,
            "system_fingerprint": self.info.fingerprint,
        }
        if kind.startswith("chat"):
            told["service_tier"] = self.work.service_tier
        if usage is not None:
            told["usage"] = usage.told()
        elif self.work.include_usage:
            told["usage"] = None
        return told

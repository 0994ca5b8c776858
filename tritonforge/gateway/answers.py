"""Responses of `decoder` as gains of single answers, and what is told of their tokens' log-probabilities. Pure."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from tritonforge import contract
from tritonforge.client import Chunk
from tritonforge.structured.tool_calls import ToolCall


class TokenTexts(Protocol):
    """What a token's text is."""

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token's text; a special token's are its name."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log-probability (None: the first of a prompt has none) and the most likely ones at its place."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Gain:
    """What answer `index` of a request gained by one response.

    `prompt` has the prompt's tokens with an echo whose log-probabilities were asked for; `calls` come with the end.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    scored: tuple[Scored, ...] = ()
    prompt: tuple[Scored, ...] = ()
    finish_reason: str | None = None
    calls: tuple[ToolCall, ...] = ()


def gains_of(chunk: Chunk) -> Iterator[Gain]:
    """One gain for each answer of a response."""
    outputs = chunk.outputs
    texts, token_ids = outputs.get(contract.TEXT_OUTPUT.name, ()), outputs.get(contract.TOKEN_IDS.name, ())
    reasons = outputs.get(contract.FINISH_REASON.name, ("",) * len(texts))
    indices = outputs.get(contract.INDEX.name, tuple(range(len(texts))))
    counts = outputs.get(contract.TOKEN_COUNTS.name, (len(token_ids),) * len(texts))
    calls = outputs.get(contract.TOOL_CALLS.name, ("",) * len(texts))
    scored = _scored(outputs, token_ids, contract.LOGPROBS, contract.TOP_IDS, contract.TOP_LOGPROBS)
    prompt = _prompt_scored(outputs)
    start = 0
    for place, text in enumerate(texts):
        end = start + counts[place]
        yield Gain(
            indices[place],
            text,
            token_ids[start:end],
            scored[start:end],
            prompt if indices[place] == 0 else (),
            reasons[place] or None,
            _calls(calls[place]),
        )
        start = end


def _calls(text: str) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(**call) for call in json.loads(text)) if text else ()


def _scored(outputs: dict[str, tuple], token_ids: tuple, logprobs: Any, ids: Any, top: Any) -> tuple[Scored, ...]:
    values = outputs.get(logprobs.name)
    if not values:
        return ()
    top_ids, top_values = outputs.get(ids.name, ()), outputs.get(top.name, ())
    k = len(top_ids) // len(values)
    return tuple(
        Scored(
            token_id,
            value,
            tuple(zip(top_ids[row * k : row * k + k], top_values[row * k : row * k + k], strict=True)),
        )
        for row, (token_id, value) in enumerate(zip(token_ids, values, strict=True))
    )


def _prompt_scored(outputs: dict[str, tuple]) -> tuple[Scored, ...]:
    """The first token of a prompt has no log-probability."""
    token_ids = outputs.get(contract.PROMPT_TOKEN_IDS.name, ())
    if not token_ids or contract.PROMPT_LOGPROBS.name not in outputs:
        return ()
    rest = _scored(
        outputs, token_ids[1:], contract.PROMPT_LOGPROBS, contract.PROMPT_TOP_IDS, contract.PROMPT_TOP_LOGPROBS
    )
    return (Scored(token_ids[0], None), *rest)


def chat_logprobs(scored: tuple[Scored, ...], texts: TokenTexts) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat completion."""
    return [
        _chat_token(one.token_id, one.logprob, texts)
        | {"top_logprobs": [_chat_token(token_id, value, texts) for token_id, value in one.top]}
        for one in scored
    ]


def _chat_token(token_id: int, logprob: float | None, texts: TokenTexts) -> dict[str, Any]:
    raw = texts.bytes_of(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


def completion_logprobs(scored: tuple[Scored, ...], texts: TokenTexts, offset: int) -> tuple[dict[str, Any], int]:
    """`logprobs` of a completion whose text so far has `offset` characters, and how many it has then.

    A token that is no whole character is told as `bytes:\\x..`, as OpenAI's API does.
    """
    told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for one in scored:
        token = _token_text(texts.bytes_of(one.token_id))
        told["tokens"].append(token)
        told["token_logprobs"].append(one.logprob)
        top = {_token_text(texts.bytes_of(token_id)): value for token_id, value in one.top}
        told["top_logprobs"].append(top if one.logprob is not None else None)
        raw = texts.bytes_of(one.token_id)
        told["text_offset"].append(offset - (raw[:1] != b"" and _continues(raw[0])))
        offset += sum(not _continues(byte) for byte in raw)  # a character counts where its first byte is
    return told, offset


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 is not the first of its character."""
    return byte & 0xC0 == 0x80


def _token_text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

"""From a request's text and options to the prompt's token ids, truncated where the request asks for it.

The tokenizer model calls it for every request; the options are already checked one by one (options.py), here they are
checked together. It knows nothing of Triton or of how the decoder works, only how many tokens the model can hold.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonforge.contract import MAX_TEXT_BYTES
from tritonforge.errors import InvalidRequest, ReleaseMismatch
from tritonforge.messages import parse_messages, parse_tools
from tritonforge.text import Tokenizer

LIMITS_FILE = "prompt.json"
"""Beside tokenizer.json in a release: {"max_model_len": N}, the decoder's N, which truncation needs."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids of a prompt; `truncated_tokens` says how many the prompt had more before it was truncated."""

    token_ids: list[int]
    truncated_tokens: int = 0


def read_max_model_len(folder: Path) -> int | None:
    """max_model_len of LIMITS_FILE, None without that file. Raises ReleaseMismatch when it holds anything else."""
    path = folder / LIMITS_FILE
    if not path.is_file():
        return None
    try:
        limits = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReleaseMismatch(f"{path} is no JSON: {error}") from None
    length = limits.get("max_model_len") if isinstance(limits, dict) and len(limits) == 1 else None
    if type(length) is not int or length < 2:
        raise ReleaseMismatch(f'{path} must hold {{"max_model_len": N}} with N of 2 or more, got {str(limits)[:80]}')
    return length


def build_prompt(
    tokenizer: Tokenizer, text: str, options: Mapping[str, Any], max_model_len: int | None = None
) -> Prompt:
    """The prompt of a request. Raises InvalidRequest when text and options do not go together, or truncation fails."""
    _check_together(text, options)
    messages = _messages(text, options)
    tools = None if options["tools"] is None else parse_tools(options["tools"])
    if messages is None:
        whole = tokenizer.encode(text)
    else:

        def encode(chat: Sequence[dict[str, Any]]) -> list[int]:
            return tokenizer.encode_chat(chat, tools, add_generation_prompt=options["add_generation_prompt"])

        whole = encode(messages)
    if options["truncate"] == "none":
        return Prompt(whole)
    room = _room(options["max_tokens"], max_model_len)
    if len(whole) <= room:
        return Prompt(whole)
    kept = tokenizer.encode_end(text, room) if messages is None else _newest_turns(encode, messages, room)
    return Prompt(kept, len(whole) - len(kept))


def _check_together(text: str, options: Mapping[str, Any]) -> None:
    if options["cancel"] is not None:
        raise InvalidRequest("cancel must be sent to the decoder, alone")
    for name, value in (("text_input", text), ("messages", options["messages"]), ("tools", options["tools"])):
        size = len((value or "").encode())
        if size > MAX_TEXT_BYTES:
            raise InvalidRequest(f"{name} must be at most {MAX_TEXT_BYTES} bytes, got {size}")
    if options["messages"] is not None:
        if text:
            raise InvalidRequest("text_input must be empty when messages is given")
    elif not text:
        raise InvalidRequest("text_input must not be empty")
    elif not options["chat"]:
        if options["tools"] is not None:
            raise InvalidRequest("tools must come with chat or messages: plain text has no place for them")
        if not options["add_generation_prompt"]:
            raise InvalidRequest("add_generation_prompt must come with chat or messages: plain text has none")


def _messages(text: str, options: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The chat that is asked for; None when the prompt is plain text."""
    if options["messages"] is not None:
        return parse_messages(options["messages"])
    return [{"role": "user", "content": text}] if options["chat"] else None


def _room(max_tokens: int | None, max_model_len: int | None) -> int:
    """Tokens that a prompt may have so that max_tokens (one, where the request does not say) fit after it."""
    if max_model_len is None:
        raise InvalidRequest(
            f"truncate must be none: this release does not tell its tokenizer max_model_len ({LIMITS_FILE} is missing)"
        )
    room = max_model_len - (max_tokens or 1)
    if room < 1:
        raise InvalidRequest(f"max_tokens must be in [1, {max_model_len - 1}], got {max_tokens}")
    return room


def _newest_turns(
    encode: Callable[[Sequence[dict[str, Any]]], list[int]], messages: Sequence[dict[str, Any]], room: int
) -> list[int]:
    """The chat without its oldest turns, as few of them as `room` asks for; system messages stay.

    A turn is a user's message and what follows it, so that no answer stays without its question and no tool result
    without its call. How many to drop is found by bisection: a chat of n turns is rendered log2(n) times.
    """
    spoken = [index for index, message in enumerate(messages) if message["role"] != "system"]
    starts = [index for index in spoken[1:] if messages[index]["role"] == "user"]

    def encode_from(start: int) -> list[int]:
        return encode([m for index, m in enumerate(messages) if index >= start or m["role"] == "system"])

    kept = encode_from(starts[-1] if starts else 0)
    if len(kept) > room:
        raise InvalidRequest(
            f"the last turn of the chat must fit: with the system messages it has {len(kept)} tokens, "
            f"max_model_len minus max_tokens leaves {room}"
        )
    low, high = 0, len(starts) - 1  # from starts[high] on it fits, in `kept`
    while low < high:
        middle = (low + high) // 2
        shorter = encode_from(starts[middle])
        if len(shorter) <= room:
            high, kept = middle, shorter
        else:
            low = middle + 1
    return kept

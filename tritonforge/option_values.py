"""Readers of option values: from what came over the wire to what the code uses. Called through options.OPTIONS alone.

A reader is given a value of the right wire type. It raises ValueError when the value breaks the option's rule.
"""

import json
import re
from collections.abc import Callable
from typing import Any

MAX_NAME_LENGTH = 64

Read = Callable[[Any], Any]


def within(low: float, high: float, *, open_low: bool = False) -> Read:
    """A number in [low, high], or in (low, high] when `open_low`."""

    def read(value: float) -> float:
        if not (low < value <= high if open_low else low <= value <= high):
            raise ValueError
        return value

    return read


def parse_json(value: str) -> Any:
    """The JSON in `value`. Raises ValueError when it is none, is nested too deeply, or holds no UTF-8 or no number."""
    try:
        parsed = json.loads(value)
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()  # nor NaN, 1e999, or half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no valid JSON: {str(error)[:80] or type(error).__name__}") from None
    return parsed


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def strings(most: int, longest: int) -> Read:
    """A plain string is a list of one; text that starts with [ is a JSON list."""

    def read(value: str) -> tuple[str, ...]:
        strings = parse_json(value) if value.startswith("[") else [value]
        _require(1 <= len(strings) <= most and all(isinstance(text, str) for text in strings))
        _require(all(1 <= len(text) <= longest for text in strings))
        return tuple(strings)

    return read


def token_ids(most: int) -> Read:
    """A JSON list of 1 to `most` token ids."""

    def read(value: str) -> tuple[int, ...]:
        ids = parse_json(value)
        _require(isinstance(ids, list) and 1 <= len(ids) <= most and all(map(_is_token_id, ids)))
        return tuple(ids)

    return read


def biases(most: int, largest: float) -> Read:
    """A JSON object of 1 to `most` token ids, each with a number in [-largest, largest]: as pairs."""

    def read(value: str) -> tuple[tuple[int, float], ...]:
        pairs = parse_json(value)
        _require(isinstance(pairs, dict) and 1 <= len(pairs) <= most)
        _require(all(type(bias) in (int, float) and -largest <= bias <= largest for bias in pairs.values()))
        _require(all(token_id == str(int(token_id)) and _is_token_id(int(token_id)) for token_id in pairs))
        return tuple((int(token_id), float(bias)) for token_id, bias in pairs.items())

    return read


def json_schema(value: str) -> str:
    """A JSON object, true or false: as its text."""
    _require(isinstance(parse_json(value), dict | bool))
    return value


def choices(value: str) -> tuple[str, ...]:
    """A JSON list of strings, none of them empty."""
    texts = parse_json(value)
    _require(isinstance(texts, list) and texts and all(isinstance(text, str) and text for text in texts))
    return tuple(texts)


def not_empty(value: str) -> str:
    """Any text but none."""
    _require(bool(value))
    return value


_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent(value: str) -> str:
    """The header of W3C's Trace Context, version 00 (https://www.w3.org/TR/trace-context/)."""
    _require(_TRACEPARENT.fullmatch(value) is not None)
    return value


def name(value: str) -> str:
    """1 to MAX_NAME_LENGTH printable characters."""
    _require(1 <= len(value) <= MAX_NAME_LENGTH and value.isprintable())
    return value


def one_of(*names: str) -> Read:
    """One of these strings."""

    def read(value: str) -> str:
        _require(value in names)
        return value

    return read

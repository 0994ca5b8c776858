"""Writes documents as YAML, in block style with quoted strings: what a person reads and any YAML parser agrees on."""

import json
from collections.abc import Iterable
from typing import Any


def to_yaml(documents: Iterable[Any]) -> str:
    """The YAML text of one or more documents of dicts, lists, strings, numbers and booleans."""
    return "---\n".join("\n".join(_block(document, 0)) + "\n" for document in documents)


def _block(value: Any, depth: int) -> list[str]:
    pad = "  " * depth
    if isinstance(value, dict) and value:
        lines = []
        for key, part in value.items():
            lines += _entry(f"{pad}{key}:", part, depth)
        return lines
    if isinstance(value, list) and value:
        lines = []
        for part in value:
            first, *rest = _block(part, depth + 1)
            lines += [f"{pad}- {first.strip()}", *rest]
        return lines
    return [pad + _scalar(value)]


def _entry(head: str, part: Any, depth: int) -> list[str]:
    if isinstance(part, dict | list) and part:
        return [head, *_block(part, depth + 1)]
    return [f"{head} {_scalar(part)}"]


def _scalar(value: Any) -> str:
    """JSON: YAML 1.2 reads it as it is."""
    return json.dumps(value, ensure_ascii=False)

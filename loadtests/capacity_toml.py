"""Writes a document back as TOML: what capacity trials, sweeps and rehearsals need to derive a contract from another.

Everything below the top level is written inline. What `tomllib` reads from the text is the document again.
"""

import json
from typing import Any

from loadtests.fields import InvalidContract


def to_toml(document: dict[str, Any]) -> str:
    """The TOML text of a document of strings, integers, floats, booleans, lists and tables.

    Raises InvalidContract for any other value, naming its key.
    """
    return "".join(f"{_key(key)} = {_value(value, key)}\n" for key, value in document.items())


def _value(value: Any, where: str) -> str:
    if isinstance(value, dict):
        parts = (f"{_key(key)} = {_value(part, f'{where}.{key}')}" for key, part in value.items())
        return "{ " + ", ".join(parts) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_value(part, where) for part in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int | float):
        return repr(value)
    raise InvalidContract(f"{where} has no TOML form here, got {value!r}")


def _key(key: str) -> str:
    return _string(key)


def _string(text: str) -> str:
    """A basic string. JSON escapes what TOML wants escaped, but for the delete character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

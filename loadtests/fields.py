"""Strict reading of TOML tables: every key is asked for by name, type and rule; what is left over is refused by name.

The contract parser uses it; it knows nothing of what the keys mean.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from tritonforge.errors import InvalidRequest

REQUIRED = object()
NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


class InvalidContract(InvalidRequest):
    """A contract breaks a rule: unknown key, wrong type, a value out of range, or an objective nothing can decide."""


class Fields:
    """One table of a document, read key by key. `where` is its dotted path, used in messages."""

    def __init__(self, table: Any, where: str):
        if not isinstance(table, dict):
            raise InvalidContract(f"{where} must be a table, got {table!r}")
        self._left = dict(table)
        self.where = where

    def path(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def has(self, key: str) -> bool:
        return key in self._left

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """The raw value of `key`; InvalidContract when it is missing and has no default."""
        if key in self._left:
            return self._left.pop(key)
        if default is REQUIRED:
            raise InvalidContract(f"{self.path(key)} is missing")
        return default

    def text(self, key: str, default: Any = REQUIRED, *, choices: Iterable[str] = ()) -> Any:
        value = self.take(key, default)
        if value is default:
            return value
        if not isinstance(value, str) or not value:
            raise InvalidContract(f"{self.path(key)} must be a non-empty string, got {value!r}")
        allowed = tuple(choices)
        if allowed and value not in allowed:
            raise InvalidContract(f"{self.path(key)} must be one of {', '.join(allowed)}, got {value!r}")
        return value

    def name(self, key: str) -> str:
        """A text that is safe as a file name and as a part of one: no dot, no slash, no pattern, no upper case."""
        value = self.text(key)
        if not NAME.fullmatch(value):
            raise InvalidContract(f"{self.path(key)} must match {NAME.pattern}, got {value!r}")
        return value

    def integer(self, key: str, default: Any = REQUIRED, *, low: int, high: int = 2**62) -> Any:
        value = self.take(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidContract(f"{self.path(key)} must be an integer in [{low}, {high}], got {value!r}")
        return value

    def number(self, key: str, default: Any = REQUIRED, *, low: float, high: float = 1e12, open_low=False) -> Any:
        """A finite number in [low, high], or (low, high] with `open_low`; always returned as float."""
        value = self.take(key, default)
        if value is default:
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (open_low and value == low):
            bracket = "(" if open_low else "["
            raise InvalidContract(f"{self.path(key)} must be a number in {bracket}{low:g}, {high:g}], got {value!r}")
        return float(value)

    def boolean(self, key: str, default: Any = REQUIRED) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise InvalidContract(f"{self.path(key)} must be true or false, got {value!r}")
        return value

    def table(self, key: str, default: Any = REQUIRED) -> "Fields":
        return Fields(self.take(key, default), self.path(key))

    def tables(self, key: str, default: Any = REQUIRED) -> list["Fields"]:
        return [Fields(item, f"{self.path(key)}[{index}]") for index, item in enumerate(self.items(key, default))]

    def items(self, key: str, default: Any = REQUIRED) -> list[Any]:
        """A list of whatever; `...` as a default means that it is required, too."""
        value = self.take(key, REQUIRED if default is ... else default)
        if not isinstance(value, list):
            raise InvalidContract(f"{self.path(key)} must be a list of tables or values, got {value!r}")
        return value

    def texts(self, key: str, default: Any = REQUIRED) -> list[str]:
        """A list of non-empty strings."""
        items = self.items(key, default)
        if not all(isinstance(item, str) and item for item in items):
            raise InvalidContract(f"{self.path(key)} must be a list of non-empty strings, got {items!r}")
        return items

    def integers(self, key: str, default: Any = REQUIRED, *, low: int, high: int) -> list[int]:
        """A list of integers in [low, high]."""
        items = self.items(key, default)
        if not all(isinstance(item, int) and not isinstance(item, bool) and low <= item <= high for item in items):
            raise InvalidContract(f"{self.path(key)} must be a list of integers in [{low}, {high}], got {items!r}")
        return items

    def rest(self) -> dict[str, Any]:
        """All keys that nobody has asked for; their names and values are for the caller to judge."""
        left, self._left = self._left, {}
        return left

    def done(self) -> None:
        """Refuse, by name, every key nobody asked for."""
        if self._left:
            names = ", ".join(self.path(key) for key in sorted(self._left))
            raise InvalidContract(f"{names}: unknown key")


def read_all(items: list[Fields], read: Callable[[Fields], Any]) -> tuple:
    """Read each table with `read` and refuse its left-over keys."""
    found = []
    for item in items:
        found.append(read(item))
        item.done()
    return tuple(found)

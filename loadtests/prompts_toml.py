"""Reads from TOML where prompts come from, which options they carry, and quality sets with their checks. Strict.

contract_toml calls it; the meaning of the values is in workload.
"""

import re
from typing import Any

from loadtests.fields import Fields, InvalidContract
from loadtests.workload import Data, QualityItem

OWN_OPTIONS = ("max_tokens", "ignore_eos", "stream", "tenant", "priority_class", "cancel")
"""Options that the load generator gives itself; `max_tokens` of a quality item is a key of its own."""
CHECKS = ("exact", "contains", "regex", "json")


def read_data(fields: Fields) -> Data:
    data = Data(
        source=fields.text("source", "synthetic", choices=["synthetic", "quality"]),
        seed=fields.integer("seed", low=0),
        shared_prefix_tokens=fields.integer("shared_prefix_tokens", 0, low=0, high=1_000_000),
        prefixes=fields.integer("prefixes", 1, low=1, high=10_000),
    )
    fields.done()
    return data


def read_options(fields: Fields) -> tuple[tuple[str, Any], ...]:
    """Generation options as they are sent; the server refuses those it does not know."""
    options = fields.rest()
    for name, value in options.items():
        if name in OWN_OPTIONS:
            raise InvalidContract(f"{fields.path(name)} is set by the load generator and cannot be given")
        if not isinstance(value, bool | int | float | str):
            raise InvalidContract(f"{fields.path(name)} must be a string, a number, true or false, got {value!r}")
    return tuple(sorted(options.items()))


def read_quality(fields: Fields) -> QualityItem:
    check = fields.text("check", choices=CHECKS)
    item = QualityItem(
        id=fields.name("id"),
        prompt=fields.text("prompt"),
        max_tokens=fields.integer("max_tokens", low=1, high=1_000_000),
        check=check,
        expect=tuple(fields.texts("expect", [] if check == "json" else ...)),
        options=read_options(fields.table("options", {})),
    )
    if check == "regex":
        try:
            re.compile(item.expect[0])
        except (re.error, IndexError) as error:
            raise InvalidContract(f"{fields.path('expect')} must hold one regular expression: {error}") from None
    if check != "json" and not item.expect:
        raise InvalidContract(f"{fields.path('expect')} must hold at least one text")
    return item

"""The fields of a recipe: their rules, and checking parsed TOML against them. recipe.py uses it, and the targets
for their own properties.

A section of a recipe is a frozen dataclass whose fields are made by `rule`.
"""

import math
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, get_args

import checkout  # noqa: F401  (puts the repository root on sys.path)

from tritonforge.errors import InvalidRecipe


def rule(
    default: Any = ...,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple = (),
    word: str = "",
) -> Any:
    """A field of a section with its range or its choices; without a default the recipe must give it.

    A `word` may stand instead of a value of the field's first type.
    """
    metadata = {"low": low, "high": high, "choices": choices, "word": word}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


def take(cls: type, data: dict[str, Any], prefix: str, sections: Mapping[str, type]) -> dict[str, Any]:
    """Constructor arguments of `cls` out of `data`, each checked; sections are built on the way."""
    known = {item.name: item for item in fields(cls)}
    for key in data:
        if key not in known:
            raise InvalidRecipe(f"{prefix}{key} is not a key of a recipe; known here: {', '.join(known)}")
    values = {}
    for name, item in known.items():
        label = prefix + name
        if name not in data:
            if item.default is item.default_factory:  # both are dataclasses.MISSING
                raise InvalidRecipe(f"{label} is missing")
            continue
        if name in sections:
            if not isinstance(data[name], dict):
                raise InvalidRecipe(f"{label} must be a table, got {data[name]!r}")
            values[name] = sections[name](**take(sections[name], data[name], f"{name}.", {}))
        else:
            values[name] = _value(label, data[name], item)
    return values


def _value(label: str, value: Any, item: Any) -> Any:
    """`value` when it has the field's type and keeps its rule; an integer is accepted for a float field."""
    word = item.metadata.get("word")
    if word and value == word:
        return value
    kind = get_args(item.type)[0] if word else item.type
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise InvalidRecipe(f"{label} must be {kind.__name__}{f' or {word!r}' if word else ''}, got {value!r}")
    choices, low, high = (item.metadata.get(key) for key in ("choices", "low", "high"))
    if choices and value not in choices:
        raise InvalidRecipe(f"{label} must be one of {', '.join(choices)}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRecipe(f"{label} must be a finite number, got {value}")
    if low is not None and not low <= value <= high:
        raise InvalidRecipe(f"{label} must be in [{low}, {high}], got {value}")
    return value


def check_properties(label: str, given: Mapping[str, Any], known: Mapping[str, tuple | range]) -> None:
    """Raise InvalidRecipe for a property of a target that is not among the `known`, or whose value is none of its own.

    `label` is where the recipe gives them.
    """
    for name, value in given.items():
        if name not in known:
            raise InvalidRecipe(f"{label}.{name} must be one of {', '.join(known)}")
        values = known[name]
        if type(value) is not type(values[0]) or value not in values:
            raise InvalidRecipe(f"{label}.{name} must be {_values_rule(values)}, got {value!r}")


def _values_rule(values: tuple | range) -> str:
    if isinstance(values, range):
        return f"in [{values[0]}, {values[-1]}]"
    return "true or false" if isinstance(values[0], bool) else f"one of {values}"

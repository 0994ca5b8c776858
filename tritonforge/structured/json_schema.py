"""What a JSON schema must be before a grammar is made of it: the rules that the grammar library does not check.

structured.py asks. What is refused here the library would ignore, or compile for minutes, or let a model write without
an end. Keywords it does not support and plain contradictions (minimum above maximum, an empty enum) it finds itself.
"""

import json
import math
from decimal import Decimal
from typing import Any

MAX_MULTIPLE = 10_000
"""Least common multiple of all multipleOf of a schema, decimal places left out: their automaton has as many states."""

_MAX_ROUNDS = 64

Schema = dict[str, Any]


def read_schema(text: str) -> Schema:
    """The schema in `text`; true is {}. Raises ValueError saying what it is not, or why it can never be followed."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no valid JSON: {str(error)[:80] or type(error).__name__}") from None
    if schema is True:
        return {}
    if schema is False:
        raise ValueError("no answer can match it: the schema is false")
    if not isinstance(schema, dict):
        raise ValueError("it must be a JSON object, true or false")
    if "x-guidance" in schema:
        raise ValueError("x-guidance is not supported: it would change what other keywords mean")
    objects = _objects(schema)
    _check_multiples(objects)
    _check_min_properties(objects)
    if not _can_end(schema, objects):
        raise ValueError("no answer can match it: what it requires contains itself, without an end")
    return schema


def _objects(schema: Schema) -> list[Schema]:
    """All JSON objects in `schema`, inner ones before outer ones: its subschemas, and some that are none."""
    found, todo = [], [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            found.append(value)
        todo.extend(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    return found[::-1]


def _check_multiples(objects: list[Schema]) -> None:
    steps = {one["multipleOf"] for one in objects if type(one.get("multipleOf")) in (int, float)}
    least = math.lcm(*(_coefficient(step) for step in steps if math.isfinite(step)))
    if least > MAX_MULTIPLE:
        raise ValueError(f"the least common multiple of all multipleOf must be at most {MAX_MULTIPLE}, got {least}")


def _coefficient(number: float) -> int:
    """Of 250 it is 250, of 0.25 it is 25."""
    _, digits, exponent = Decimal(str(number)).normalize().as_tuple()
    return int("".join(map(str, digits))) * 10 ** max(int(exponent), 0)


def _check_min_properties(objects: list[Schema]) -> None:
    """Free keys may repeat in what the grammar allows, and a repeated key is one property only."""
    for one in objects:
        least, required = one.get("minProperties"), one.get("required")
        if type(least) is int and least > max(1, len(required) if isinstance(required, list) else 0):
            raise ValueError(f"minProperties above 1 must not exceed the number of required properties, got {least}")


def _can_end(root: Schema, objects: list[Schema]) -> bool:
    """Whether some finite value might match, as far as required properties and items tell. True when in doubt.

    The least fixed point: a schema can end when all that it requires can.
    """
    ending: set[int] = set()
    for _ in range(_MAX_ROUNDS):
        before = len(ending)
        ending.update(id(one) for one in objects if id(one) not in ending and _ends(one, root, ending))
        if id(root) in ending:
            return True
        if len(ending) == before:
            return False
    return True


def _ends(schema: Schema, root: Schema, ending: set[int]) -> bool:
    def ends(part: Any) -> bool:
        return id(part) in ending if isinstance(part, dict) else part is not False

    if "$ref" in schema and not ends(_referred(root, schema["$ref"])):
        return False
    for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if isinstance(schema.get(key), list) and not enough(map(ends, schema[key])):
            return False
    return all(map(ends, _required_parts(schema)))


def _referred(root: Schema, reference: Any) -> Any:
    """What a reference inside the schema points at; None when this cannot tell, or the library will refuse it."""
    if reference == "#":
        return root
    part: Any = root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for name in reference[2:].split("/"):
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
    return part


def _required_parts(schema: Schema) -> list[Any]:
    """The subschemas that every value of this schema holds a match of."""
    if schema.get("type") == "object" and isinstance(schema.get("required"), list):
        free = None if "patternProperties" in schema else schema.get("additionalProperties")
        properties = schema.get("properties") if isinstance(schema.get("properties"), dict) else {}
        return [properties.get(name, free) for name in schema["required"] if isinstance(name, str)]
    if schema.get("type") == "array" and type(schema.get("minItems")) is int:
        first = schema.get("prefixItems") if isinstance(schema.get("prefixItems"), list) else []
        return [*first, schema.get("items")][: schema["minItems"]] if schema["minItems"] > 0 else []
    return []

"""The one door from a request's bytes to a checked body: what it raises names the field, as OpenAI's API does."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tritonforge.gateway.api.errors import ApiError, invalid, unsupported
from tritonforge.gateway.api.fields import REFUSED_CHAT, REFUSED_COMPLETIONS
from tritonforge.gateway.api.schemas import JSON, ChatRequest, CompletionRequest
from tritonforge.options import shown

Body = TypeVar("Body", bound=BaseModel)

_REFUSED: dict[type[BaseModel], Mapping[str, str]] = {ChatRequest: REFUSED_CHAT, CompletionRequest: REFUSED_COMPLETIONS}
"""Refused fields of a body with their reasons."""


def read(kind: type[Body], body: bytes) -> Body:
    """The request in `body`. Raises ApiError naming the first field that is unknown, refused or breaks its rule."""
    try:
        content = json.loads(body, parse_constant=_refuse_constant)
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()  # nor 1e999, nor half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"The body must be JSON: {_why(error)}", "invalid_json") from None
    if not isinstance(content, dict):
        raise invalid(None, "The body must be a JSON object.", "invalid_json")
    refused = _REFUSED.get(kind, {})
    for name in content.keys() & refused.keys():
        if content[name] is not None:
            raise unsupported(name, refused[name])
        del content[name]
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _told(error, content) from None


class _Refused(ValueError):
    """Not JSON, for a reason that we name ourselves."""


MOST_OF_A_NAME = 200
"""Characters of a field's name in an error: a body may be all one key."""


def _refuse_constant(name: str) -> None:
    raise _Refused(f"{name} is no JSON")


def _why(error: ValueError | RecursionError) -> str:
    """What is wrong with a body, in words that tell nothing of the interpreter."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeError):
        return "its text is not valid UTF-8"
    if isinstance(error, json.JSONDecodeError | _Refused):
        return str(error)[:120]
    return "a number in it is too large"


def _told(error: ValidationError, content: JSON) -> ApiError:
    """What is wrong first; a rule that fails in a union's every branch is told for the branch that came furthest."""
    found = max(error.errors(include_url=False, include_context=False), key=lambda one: len(one["loc"]))
    name = _place(found["loc"], content, missing=found["type"] == "missing")[:MOST_OF_A_NAME]
    if found["type"] == "extra_forbidden":
        return invalid(name, f"Unknown parameter: '{name}'.", "unknown_parameter")
    if found["type"] == "missing":
        return invalid(name, f"Missing required parameter: '{name}'.", "missing_required_parameter")
    return invalid(name, f"Invalid '{name}': {found['msg']}, got {shown(found['input'])}")


def _place(location: tuple[int | str, ...], content: Any, *, missing: bool) -> str:
    """The field's name as `messages[0].content`: the steps of `location` that lead through the body, without tags."""
    name, value = "", content
    for index, step in enumerate(location):
        if isinstance(value, list) and isinstance(step, int):
            name += f"[{step}]"
            value = value[step] if step < len(value) else None
        elif isinstance(value, dict) and (step in value or (missing and index == len(location) - 1)):
            name += f".{step}" if name else str(step)
            value = value.get(step)
    return name

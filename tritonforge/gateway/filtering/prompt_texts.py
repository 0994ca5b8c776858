"""The texts of a request that a prompt filter looks at, and how they are replaced everywhere they are kept. Pure."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tritonforge.gateway.work import PromptSource, Work

_SAID = ("content", "text", "arguments")
"""Keys of a message whose values are replaced."""
_NAMES = ("model", "role", "type", "service_tier")
"""Keys whose values nobody wrote for the model to read."""
_IDS = ("id", "tool_call_id")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""An id of a tool call; what has another form is read as any text."""
_SCHEMAS = ("parameters", "schema")
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_KEYWORD = re.compile(
    r"\$(defs|id|ref|schema)|(min|max)(imum|Items|Length|Properties)|exclusive(Min|Max)imum|multipleOf|format|pattern"
    r"|(pattern|additional|unevaluated)?[Pp]roperties|propertyNames|(prefix|unevaluated)?[Ii]tems|uniqueItems|required"
    r"|dependent(Required|Schemas)|definitions|(all|any|one)Of|not|if|then|else|type|enum|const|contains|default"
    r"|title|description|examples|deprecated|readOnly|writeOnly|nullable|strict"
)
"""Of JSON Schema: every other key of a schema is a name that somebody chose, and the model reads it."""
BETWEEN = "\n"
"""What stands between the texts of a chat that is read as one; templates join the parts of a message so."""


def texts_of(work: Work) -> Iterator[str]:
    """Every text of the request: prompts, messages, and what its tools and schemas say."""
    for source in work.prompts:
        if source.text:
            yield source.text
    if work.asked is not None:
        content = _dump(work.asked)
        yield from _strings({name: value for name, value in content.items() if name != "prompt"})
    else:
        for source in work.prompts:
            yield from _strings(json.loads(source.options.get("messages", "[]")))


def said_in(work: Work) -> list[str]:
    """The texts of a chat in their order, each part of a message for itself; none for a completion."""
    if work.asked is not None:
        messages = _dump(work.asked).get("messages", [])
    else:
        messages = [json.loads(source.options.get("messages", "[]")) for source in work.prompts]
    return [text for text in _said(messages, said=False) if text]


def told_beside(work: Work) -> Iterator[str]:
    """What the model reads beside a chat and nothing can replace: names, descriptions, schemas, ids."""
    content = _dump(work.asked) if work.asked is not None else {}
    for name in ("tools", "response_format"):
        yield from _strings(content.get(name))
    yield from _strings([_without_said(message) for message in content.get("messages", ())])


def _dump(asked: Any) -> dict[str, Any]:
    return asked.model_dump(exclude_none=True, by_alias=True)


def _strings(value: Any, *, schema: bool = False) -> Iterator[str]:
    """The strings of a request; of a schema also the names of its properties."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if schema and _KEYWORD.fullmatch(key) is None:
                yield key
            if not _is_fixed(key, inner, schema=schema):
                yield from _strings(inner, schema=schema or key in _SCHEMAS)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, schema=schema)


def _is_fixed(key: str, value: Any, *, schema: bool) -> bool:
    """Whether the API says what the value may be, so that it is no text of somebody's."""
    if schema:
        return key == "type" and all(one in _TYPES for one in (value if isinstance(value, list) else [value]))
    return key in _NAMES or (key in _IDS and isinstance(value, str) and _ID.fullmatch(value) is not None)


def _said(value: Any, *, said: bool) -> Iterator[str]:
    if isinstance(value, str) and said:
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _said(inner, said=key in _SAID)
    elif isinstance(value, list):
        for inner in value:
            yield from _said(inner, said=said)


def _without_said(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_said(inner) for key, inner in value.items() if key not in _SAID}
    return [_without_said(inner) for inner in value] if isinstance(value, list) else value


def rewritten(work: Work, change: Callable[[str], str]) -> Work:
    """The work with every text of its prompts and messages changed."""

    def of_source(source: PromptSource) -> PromptSource:
        if "messages" not in source.options:
            return replace(source, text=change(source.text))
        messages = _mapped(json.loads(source.options["messages"]), change, said=False)
        return replace(source, options={**source.options, "messages": json.dumps(messages, ensure_ascii=False)})

    asked = work.asked
    if asked is not None:
        body = _dump(asked)
        body |= {
            name: _mapped(body[name], change, said=name == "prompt") for name in ("messages", "prompt") if name in body
        }
        asked = type(asked).model_validate(body)
    return replace(work, prompts=tuple(of_source(source) for source in work.prompts), asked=asked)


def _mapped(value: Any, change: Callable[[str], str], *, said: bool) -> Any:
    if isinstance(value, str):
        return change(value) if said else value
    if isinstance(value, dict):
        return {key: _mapped(inner, change, said=key in _SAID) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, change, said=said) for inner in value]
    return value

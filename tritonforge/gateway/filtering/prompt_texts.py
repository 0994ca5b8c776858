"""The texts of a request that a prompt filter looks at, and how they are replaced everywhere they are kept. Pure."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tritonforge.gateway.work import PromptSource, Work

_SAID = ("content", "text", "arguments")
"""Keys of a message whose values are replaced."""
_NAMES = ("model", "role", "type", "id", "tool_call_id", "service_tier")
"""Keys whose values nobody wrote for the model to read."""


def texts_of(work: Work) -> Iterator[str]:
    """Every text of the request: prompts, messages, and what its tools and schemas say."""
    for source in work.prompts:
        if source.text:
            yield source.text
    if work.asked is not None:
        content = work.asked.model_dump(exclude_none=True, by_alias=True)
        yield from _strings({name: value for name, value in content.items() if name != "prompt"})
    else:
        for source in work.prompts:
            yield from _strings(json.loads(source.options.get("messages", "[]")))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in _NAMES:
                yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def rewritten(work: Work, change: Callable[[str], str]) -> Work:
    """The work with every text of its prompts and messages changed."""

    def of_source(source: PromptSource) -> PromptSource:
        if "messages" not in source.options:
            return replace(source, text=change(source.text))
        messages = _mapped(json.loads(source.options["messages"]), change, said=False)
        return replace(source, options={**source.options, "messages": json.dumps(messages, ensure_ascii=False)})

    asked = work.asked
    if asked is not None:
        body = asked.model_dump(exclude_none=True, by_alias=True)
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

"""The `messages` and `tools` options: OpenAI-shaped JSON in, checked Python values for the chat template out.

The tokenizer model calls it before it renders. What a key means is fixed here; chat.py decides whether the model's
template writes it. Every refusal names the place, the value and the rule.
"""

import re
from collections.abc import Collection
from typing import Any

from tritonforge.errors import InvalidRequest
from tritonforge.option_values import parse_json

KEYS = {
    "system": ("role", "content"),
    "user": ("role", "content"),
    "assistant": ("role", "content", "tool_calls", "reasoning_content"),
    "tool": ("role", "content", "tool_call_id", "name"),
}
"""Role -> the keys that its messages may have."""

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The names of functions; the rule is that of OpenAI's API reference."""


def parse_messages(value: str) -> list[dict[str, Any]]:
    """The messages of a chat, ready for a template: text parts are joined, the arguments of tool calls are objects.

    transformers gives templates arguments as an object, OpenAI's clients send them as JSON text: both are taken.
    Raises InvalidRequest naming what is wrong.
    """
    return [_message(message, f"messages[{index}]") for index, message in enumerate(_parse_list("messages", value))]


def parse_tools(value: str) -> list[dict[str, Any]]:
    """The tools that the model may call, as {"type": "function", "function": {...}} in the order of their keys.

    Raises InvalidRequest naming what is wrong.
    """
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(_parse_list("tools", value))]
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(f"tools[{index}].function.name must be unique, got {name!r} again")
    return tools


def _parse_list(option: str, value: str) -> list[Any]:
    try:
        parsed = parse_json(value)
    except ValueError as error:
        raise InvalidRequest(f"{option} must be JSON: {error}") from None
    if not isinstance(parsed, list) or not parsed:
        raise InvalidRequest(f"{option} must be a JSON list with at least one element, got {_shown(parsed)}")
    return parsed


def _message(message: Any, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if isinstance(message, dict) and not (isinstance(role, str) and role in KEYS):
        raise InvalidRequest(f"{where}.role must be one of {', '.join(KEYS)}, got {_shown(role)}")
    _check_keys(message, where, known=KEYS.get(role, ()), required=("role",))
    # Clients write null for what is not there; templates ask whether the key is.
    checked = {key: value for key, value in message.items() if value is not None or key == "content"}
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or not calls:
            raise InvalidRequest(f"{where}.tool_calls must be a list with at least one call, got {_shown(calls)}")
        checked["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if checked.get("content") is not None:
        checked["content"] = _content(checked["content"], f"{where}.content")
    elif calls is None:
        raise InvalidRequest(f"{where}.content must be a string; only an assistant's message with tool_calls has none")
    for key in ("tool_call_id", "name", "reasoning_content"):
        if not isinstance(checked.get(key, ""), str):
            raise InvalidRequest(f"{where}.{key} must be a string, got {_shown(checked[key])}")
    return checked


def _content(content: Any, where: str) -> str:
    """A string, or the text parts of a list joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where} must be a string or a list of text parts, got {_shown(content)}")
    texts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if isinstance(part, dict) and part.get("type") != "text":
            raise InvalidRequest(
                f"{place}.type must be text: this model takes no other, got {_shown(part.get('type'))}"
            )
        _check_keys(part, place, known=("type", "text"), required=("type", "text"))
        if not isinstance(part["text"], str):
            raise InvalidRequest(f"{place}.text must be a string, got {_shown(part['text'])}")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    _check_keys(call, where, known=("id", "type", "function"), required=("function",))
    _check_type(call, where)
    if not isinstance(call.get("id", ""), str):
        raise InvalidRequest(f"{where}.id must be a string, got {_shown(call['id'])}")
    function = call["function"]
    _check_keys(function, f"{where}.function", known=("name", "arguments"), required=("name", "arguments"))
    _check_name(function["name"], f"{where}.function.name")
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            raise InvalidRequest(f"{where}.function.arguments must be JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.function.arguments must be a JSON object, got {_shown(arguments)}")
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    _check_keys(tool, where, known=("type", "function"), required=("type", "function"))
    _check_type(tool, where)
    function, place = tool["function"], f"{where}.function"
    _check_keys(function, place, known=("name", "description", "parameters", "strict"), required=("name",))
    _check_name(function["name"], f"{place}.name")
    if function.get("strict") not in (None, False):
        raise InvalidRequest(f"{place}.strict must be false: calls are not constrained to a tool's schema")
    if not isinstance(function.get("description", ""), str):
        raise InvalidRequest(f"{place}.description must be a string, got {_shown(function['description'])}")
    if "parameters" in function:
        _check_parameters(function["parameters"], f"{place}.parameters")
    # A template writes a tool as it stands: `strict`, which asks for nothing here, must not change the prompt.
    return {**tool, "function": {key: value for key, value in function.items() if key != "strict"}}


def _check_parameters(schema: Any, where: str) -> None:
    """The arguments of a function are an object; templates read its `properties` and `required` without looking."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise InvalidRequest(f'{where} must be a JSON schema with "type": "object", got {_shown(schema)}')
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(part, dict) for part in properties.values()):
        raise InvalidRequest(f"{where}.properties must be an object of JSON schemas, got {_shown(properties)}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidRequest(f"{where}.required must be a list of strings, got {_shown(required)}")


def _check_keys(value: Any, where: str, *, known: Collection[str], required: Collection[str]) -> None:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be a JSON object, got {_shown(value)}")
    for key in value:
        if key not in known:
            raise InvalidRequest(f"{where} has the unknown key {_shown(key)}; known keys: {', '.join(known)}")
    for key in required:
        if key not in value:
            raise InvalidRequest(f"{where} must have the key {key}")


def _check_type(value: dict[str, Any], where: str) -> None:
    if value.get("type", "function") != "function":
        raise InvalidRequest(f"{where}.type must be function, got {_shown(value['type'])}")


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(f"{where} must be 1 to 64 letters, digits, _ or -, got {_shown(name)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

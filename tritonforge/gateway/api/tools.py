"""Tools: how a request's functions reach the model, and how its calls are read out of an answer. Pure.

A chat template that writes tools gets them as they are, and `decoder` reads the calls (tool_calls.py). For any other
model they are described in the system message, and a grammar lets the answer be either text or nothing but calls, in
Hermes' form; the arguments then always follow the function's schema. A call that must come leaves only the calls.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritonforge.gateway.api.chat_messages import instruct, text_of
from tritonforge.gateway.api.errors import invalid
from tritonforge.gateway.api.schemas import AllowedChoice, ChatRequest, NamedChoice, Tool
from tritonforge.structured.tool_calls import HERMES, ToolCall, parse

BEGIN, END = HERMES.markers[0], HERMES.end

INSTRUCTION = """You can call functions. To call one, answer with nothing but a line
{begin}{{"name": "the function", "arguments": {{}}}}{end}
with its arguments as a JSON object; several calls are several lines. Their results come back as messages. Functions:
{functions}"""

TEXT = "TEXT: /([^<]|<[^t]|<t[^o])(?s:.*)/"
"""An answer in text: it does not begin as a call does."""


@dataclass(frozen=True)
class ToolUse:
    """How one request uses tools: `messages` and `options` for the model; `native` are the tools for its template.

    `offered` are the functions that may be called; none when the choice is `none`. `named`: the answer is nothing but
    the arguments of this one.
    """

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    offered: tuple[str, ...] = ()
    native: str | None = None
    named: str | None = None


def plan_tools(asked: ChatRequest, messages: list[dict[str, Any]], *, takes_tools: bool) -> ToolUse | None:
    """What the request's tools ask of the model; None for a request without any. Raises ApiError."""
    if asked.tools is None:
        _refuse_without_tools(asked)
        return None if takes_tools else _history_only(messages)
    tools, forced = _choose(asked, asked.tools)
    if takes_tools:
        if forced:
            raise invalid("tool_choice", "tool_choice must be auto or none: this model's calls cannot be demanded")
        if asked.parallel_tool_calls is False:
            raise invalid("parallel_tool_calls", "parallel_tool_calls must be true: this model's calls are not counted")
        if not tools:
            return None
        native = json.dumps([tool.model_dump(exclude_none=True) for tool in tools], ensure_ascii=False)
        return ToolUse(messages, {"tools": native}, tuple(tool.function.name for tool in tools), native)
    plain = [write_plainly(message) for message in messages]
    if not tools:
        return ToolUse(plain, {})
    told, offered = instruct(plain, _instruction(tools)), tuple(tool.function.name for tool in tools)
    several = asked.parallel_tool_calls is not False and not isinstance(asked.tool_choice, NamedChoice)
    if forced and len(tools) == 1 and not several:
        schema = json.dumps(_parameters(tools[0]), ensure_ascii=False)
        return ToolUse(told, {"json_schema": schema}, offered, named=offered[0])
    return ToolUse(told, {"grammar": call_grammar(tools, forced=forced, several=several)}, offered)


def _refuse_without_tools(asked: ChatRequest) -> None:
    for name in ("tool_choice", "parallel_tool_calls"):
        value = getattr(asked, name)
        if value is not None and value != "none":
            raise invalid(name, f"{name} must come with tools")


def _history_only(messages: list[dict[str, Any]]) -> ToolUse | None:
    """Calls and results of earlier turns, for a template that cannot write them."""
    if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        return None
    return ToolUse([write_plainly(message) for message in messages], {})


def _choose(asked: ChatRequest, tools: list[Tool]) -> tuple[list[Tool], bool]:
    """The tools that may be called, and whether one must be."""
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(f"tools[{index}].function.name", f"names of tools must differ, got {name!r} again")
    choice = asked.tool_choice
    if choice == "none":
        return [], False
    if isinstance(choice, NamedChoice):
        return [_find(tools, choice.function.name)], True
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        return [_find(tools, one.function.name) for one in allowed.tools], allowed.mode == "required"
    return tools, choice == "required"


def _find(tools: list[Tool], name: str) -> Tool:
    found = next((tool for tool in tools if tool.function.name == name), None)
    if found is None:
        raise invalid("tool_choice", f"tool_choice must name one of the tools, got {name!r}")
    return found


def call_grammar(tools: Sequence[Tool], *, forced: bool, several: bool) -> str:
    """The grammar (Lark) of an answer: calls of `tools`, each with arguments of its schema, or any text if not forced.

    Each schema is a rule of its own, so that its references keep their root.
    """
    rules = [
        f"start: {'calls' if forced else 'calls | TEXT'}",
        'calls: call ("\\n" call)*' if several else "calls: call",
    ]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        before = json.dumps(f'{BEGIN}{{"name": "{tool.function.name}", "arguments": ')
        schema = _parameters(tool)
        rules.append(f"call_{index}: {before} arguments_{index} {json.dumps('}' + END)}")
        rules.append(f"arguments_{index}: %json {json.dumps(schema, ensure_ascii=False)}")
    return "\n".join([*rules, *([] if forced else [TEXT])])


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments: an object, of the parameters alone unless it says that others may come."""
    schema = {"type": "object"} | (tool.function.parameters or {})
    return {"additionalProperties": False} | schema if "properties" in schema else schema


def write_plainly(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a chat with calls as plain roles and texts, in the form that the instruction asks for."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{text_of(message['content'])}</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [
        f'{BEGIN}{{"name": "{call["function"]["name"]}", "arguments": {call["function"]["arguments"]}}}{END}'
        for call in calls
    ]
    before = text_of(message.get("content") or "")
    return {"role": "assistant", "content": "\n".join(([before] if before else []) + lines)}


def _instruction(tools: Sequence[Tool]) -> str:
    functions = [tool.function.model_dump(exclude_none=True, exclude={"strict"}) for tool in tools]
    listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    return INSTRUCTION.format(begin=BEGIN, end=END, functions=listed)


class CallReader:
    """Reads one answer as it comes: text is passed on as soon as it cannot begin a call, calls come at the end."""

    def __init__(self, use: ToolUse) -> None:
        self._offered, self._named = use.offered, use.named
        self._native = use.native is not None
        self._text = ""
        self._told = 0

    def push(self, text: str, *, final: bool, native: tuple[ToolCall, ...] = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """The text to show after `text` came, and, at the end, the calls. `native` are those that `decoder` read."""
        self._text += text
        if not self._offered:
            return text, ()
        if final:
            calls = native or (() if self._native else self._calls())
            return ("" if calls else self._text[self._told :]), calls
        if (
            self._native
            or self._named
            or self._text.startswith(BEGIN[: len(self._text)])
            or self._text.startswith(BEGIN)
        ):
            return "", ()  # it may be, or is, a call
        new, self._told = self._text[self._told :], len(self._text)
        return new, ()

    def _calls(self) -> tuple[ToolCall, ...]:
        """The calls that are complete; of a named function's arguments also the part that there is."""
        if self._named:
            return (ToolCall(_call_id(), self._named, self._text),)
        if not self._text.startswith(BEGIN):
            return ()
        found = parse(HERMES, self._text, self._offered).tool_calls
        return tuple(ToolCall(_call_id(), call.name, call.arguments) for call in found)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"

"""Tool calls in an answer's text: which format a model was taught, and the calls that its answer makes.

The API edge calls it on answers to requests with tools. It is pure, and it never fails: what is no complete call stays
content, with a reason. Formats, with where they are described:

- hermes: <tool_call>{"name", "arguments"}</tool_call>; NousResearch/Hermes-Function-Calling; Qwen2.5, Qwen3, SmolLM3.
- llama3_json: {"name", "parameters"}, with or without <|python_tag|> in front, several with ; between; Meta's Llama 3.1
  prompt format, vLLM's llama3_json parser.
- mistral: [TOOL_CALLS] and a list of {"name", "arguments"}; Mistral's instruct tokenizers before v11.
- granite: <|tool_call|> (3.0) or <tool_call> (3.1) and a list; table 3 of the Granite 3.0 paper, vLLM's granite parser.
- phi4_mini: <|tool_call|>, an object or a list, <|/tool_call|>; llama.cpp's template for Phi-4-mini.
- functools: functools and a list; the template that vLLM and SGLang serve Phi-4-mini with.

Markers may be special tokens: [TOOL_CALLS] (mistral-inference issue 162), <|python_tag|> and Granite's <|tool_call|>
are; <tool_call> is none in Qwen2.5 and Qwen3, but is one in some models (vLLM pull request 25281). Answers are decoded
without special tokens, so such markers are gone. An answer that is nothing but calls is therefore read without markers
too; calls that lost their markers between other text stay content.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCallFormat:
    """How a model family writes calls: a marker, then one call or a list of calls as JSON, then `end`, which may lack.

    `bare` formats may lose their markers, see above. `id_form` makes a call's id from its index in the answer.
    """

    name: str
    markers: tuple[str, ...]
    end: str = ""
    bare: bool = True
    id_form: str = "call_{}"


@dataclass(frozen=True)
class ToolCall:
    """One call: `arguments` is a JSON object, in the very text that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer's text without its calls, the calls, and why what looked like a call is none.

    Without calls `content` is the whole text; with calls it is what was around them, stripped of white space.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


HERMES = ToolCallFormat("hermes", ("<tool_call>",), "</tool_call>")
LLAMA3_JSON = ToolCallFormat("llama3_json", ("<|python_tag|>",))
# Mistral's templates refuse a history whose call ids are not nine letters and digits.
MISTRAL = ToolCallFormat("mistral", ("[TOOL_CALLS]",), id_form="call{:05d}")
GRANITE = ToolCallFormat("granite", ("<|tool_call|>", "<tool_call>"))
PHI4_MINI = ToolCallFormat("phi4_mini", ("<|tool_call|>",), "<|/tool_call|>")
FUNCTOOLS = ToolCallFormat("functools", ("functools",), bare=False)
FORMATS = {form.name: form for form in (HERMES, LLAMA3_JSON, MISTRAL, GRANITE, PHI4_MINI, FUNCTOOLS)}

SIGNS = (
    ("functools[", FUNCTOOLS),
    ("<|/tool_call|>", PHI4_MINI),
    ("<|tool_call|>", GRANITE),
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
    ("<|python_tag|>", LLAMA3_JSON),
    ('"parameters": dictionary', LLAMA3_JSON),
)
"""What a template of a format contains; the first that is there decides."""

OTHER_FORMATS = ("<function=", "<arg_key>", "[ARGS]")
"""Templates with these use a known marker around something else than JSON calls (Qwen3-Coder, GLM-4.5, Mistral v11)."""

SPACE = " \t\r\n"
CALL_KEYS = {"name", "arguments", "parameters", "id", "type"}

Found = tuple[str, str]
"""Name and arguments of a call."""


def detect_format(template_source: str) -> ToolCallFormat | None:
    """The format that a chat template asks its model for; None for a template without one, or with one unknown here."""
    if any(sign in template_source for sign in OTHER_FORMATS):
        return None
    return next((form for sign, form in SIGNS if sign in template_source), None)


def parse(form: ToolCallFormat, text: str, offered: Collection[str] | None = None) -> ParsedAnswer:
    """The calls of an answer, and the rest of it. `offered` are the names of the request's tools.

    A call without a marker must be of an offered tool (None: of any): other JSON is an answer, not a call.
    """
    content, found, problems = [], [], []
    position = 0
    while (place := _next_marker(form, text, position)) is not None:
        begin, after_marker = place
        content.append(text[position:begin])
        try:
            calls, position = _read_calls(text, _skip(text, after_marker))
        except ValueError as error:
            problems.append(f"{text[begin:after_marker]} at {begin} starts no call: {error}")
            content.append(text[begin:after_marker])
            position = after_marker
            continue
        found += calls
        end = _skip(text, position)
        if form.end and text.startswith(form.end, end):
            position = end + len(form.end)
    content.append(text[position:])
    if found:
        return ParsedAnswer("".join(content).strip(), _numbered(form, found), tuple(problems))
    bare = _read_bare(text, offered) if form.bare else []
    return ParsedAnswer("" if bare else text, _numbered(form, bare), () if bare else tuple(problems))


def _numbered(form: ToolCallFormat, found: list[Found]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(form.id_form.format(index), *call) for index, call in enumerate(found))


def _next_marker(form: ToolCallFormat, text: str, position: int) -> tuple[int, int] | None:
    """Begin and end of the first marker from `position` on."""
    places = [(text.find(marker, position), len(marker)) for marker in form.markers]
    begin, length = min((place for place in places if place[0] >= 0), default=(-1, 0))
    return None if begin < 0 else (begin, begin + length)


def _read_bare(text: str, offered: Collection[str] | None) -> list[Found]:
    """The calls of a text that is nothing else, each with its arguments and no foreign keys; else none."""
    try:
        calls, end = _read_calls(text, _skip(text, 0), strict=True)
    except ValueError:
        return []
    known = offered is None or all(name in offered for name, _ in calls)
    return calls if known and _skip(text, end, SPACE + ";") == len(text) else []


def _read_calls(text: str, start: int, *, strict: bool = False) -> tuple[list[Found], int]:
    """The calls from `start` on, one or a list or several in a row, and where they end. ValueError: there is none."""
    calls, end = _read_list(text, start, strict=strict)
    while True:
        try:
            more, end = _read_list(text, _skip(text, end, SPACE + ";,"), strict=strict)
        except ValueError:
            return calls, end
        calls += more


def _read_list(text: str, start: int, *, strict: bool) -> tuple[list[Found], int]:
    if not text.startswith("[", start):
        call, end = _read_call(text, start, strict=strict)
        return [call], end
    calls, end = [], start
    while not calls or text.startswith(",", end):
        call, end = _read_call(text, _skip(text, end + 1), strict=strict)
        calls.append(call)
        end = _skip(text, end)
    if not text.startswith("]", end):
        raise ValueError("the list of calls has no end")
    return calls, end + 1


def _read_call(text: str, start: int, *, strict: bool) -> tuple[Found, int]:
    """One call object. `strict`: it must have arguments, and nothing that is no part of a call."""
    members, end = _read_members(text, start)
    name = members.get("name", ("", ""))[0]
    if not (isinstance(name, str) and name and name.isprintable()):
        raise ValueError("a call must have a name")
    given = [members[key] for key in ("arguments", "parameters") if key in members]
    if len(given) > 1 or (strict and not given):
        raise ValueError("a call must have arguments, once")
    if strict and not members.keys() <= CALL_KEYS:
        raise ValueError("a call has no other keys than name and arguments")
    value, written = given[0] if given else ({}, "{}")
    if isinstance(value, str):  # the object as JSON text, as OpenAI's API writes it
        value, written = _decode(value, 0, whole=True)[0], value
        written.encode()  # half of a surrogate pair could not be sent
    if not isinstance(value, dict):
        raise ValueError("arguments must be a JSON object")
    return (name, written), end


def _read_members(text: str, start: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """Key -> (value, the text that wrote it) of the JSON object at `start`, and where the object ends."""
    if not text.startswith("{", start):
        raise ValueError("no JSON object")
    members: dict[str, tuple[Any, str]] = {}
    at = _skip(text, start + 1)
    if text.startswith("}", at):
        return members, at + 1
    while True:
        key, at = _decode(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or not text.startswith(":", at):
            raise ValueError("no JSON object: a key is missing")
        begin = _skip(text, at + 1)
        value, at = _decode(text, begin)
        members[key] = (value, text[begin:at])
        at = _skip(text, at)
        if text.startswith("}", at):
            return members, at + 1
        if not text.startswith(",", at):
            raise ValueError("no JSON object: it has no end")
        at = _skip(text, at + 1)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _decode(text: str, start: int, *, whole: bool = False) -> tuple[Any, int]:
    """The JSON value at `start` and where it ends. ValueError: there is none, or it is not the `whole` rest."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if whole and end != len(text):
        raise ValueError("more than one JSON value")
    return value, end


def _skip(text: str, start: int, characters: str = SPACE) -> int:
    while start < len(text) and text[start] in characters:
        start += 1
    return start

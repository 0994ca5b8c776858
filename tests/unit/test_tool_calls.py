"""Tool calls are found in the text of each family, with or without markers, and nothing is lost where there is none."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tritonforge.structured.tool_calls import (
    FORMATS,
    FUNCTOOLS,
    HERMES,
    MISTRAL,
    ParsedAnswer,
    ToolCall,
    detect_format,
    parse,
)

TEMPLATES = Path(__file__).resolve().parents[1] / "chat_templates"
WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
NOW = '{"name": "now", "arguments": {}}'


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("qwen3", "hermes"),
        ("hermes", "hermes"),
        ("smollm3", "hermes"),
        ("llama3", "llama3_json"),
        ("mistral", "mistral"),
        ("granite", "granite"),
        ("chatml", None),
        ("phi3", None),
    ],
)
def test_a_template_tells_the_format_of_its_family(template, name):
    found = detect_format((TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8"))
    assert found == (FORMATS[name] if name else None)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ '<|tool_call|>' + (call | tojson) + '<|/tool_call|>' }}", "phi4_mini"),
        ('formatted as functools[{"name": ...}]', "functools"),
        ("<tool_call>\n<function=name>\n<parameter=key>", None),
        ("<tool_call>{name}\n<arg_key>", None),
        ("[TOOL_CALLS]name[ARGS]{}", None),
        ("", None),
    ],
)
def test_a_marker_around_another_syntax_is_no_known_format(source, name):
    assert detect_format(source) == (FORMATS[name] if name else None)


TWO = [("get_weather", '{"city": "Paris"}'), ("now", "{}")]

GOLDEN = [
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>", "", TWO),
    ("hermes", f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>", "Let me see.", TWO[:1]),
    (
        "hermes",
        f"<think>\nhm\n</think>\n\n<tool_call>{WEATHER}</tool_call> ok",
        "<think>\nhm\n</think>\n\n ok",
        TWO[:1],
    ),
    ("hermes", f"<tool_call>{WEATHER}", "", TWO[:1]),
    ("hermes", f"\n{WEATHER}\n\n{NOW}\n", "", TWO),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", TWO[:1]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', "", TWO[1:]),
    ("llama3_json", f"{WEATHER}; {NOW}", "", TWO),
    ("llama3_json", f"<|python_tag|>{WEATHER}; {NOW}", "", TWO),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {NOW}]", "", TWO),
    ("mistral", f"[{WEATHER}, {NOW}]", "", TWO),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]', "", TWO[1:]),
    ("granite", f"<|tool_call|>[{WEATHER}, {NOW}]", "", TWO),
    ("granite", f"<tool_call>[{WEATHER}]", "", TWO[:1]),
    ("granite", f" [{WEATHER}] ", "", TWO[:1]),
    ("phi4_mini", f"<|tool_call|>{WEATHER}<|/tool_call|><|tool_call|>{NOW}<|/tool_call|>", "", TWO),
    ("phi4_mini", f"<|tool_call|>[{WEATHER}]<|/tool_call|>", "", TWO[:1]),
    ("functools", f"functools[{WEATHER},{NOW}]", "", TWO),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOLDEN)
def test_calls_are_found_in_the_words_of_each_family(name, text, content, calls):
    parsed = parse(FORMATS[name], text, offered=("get_weather", "now"))
    assert (parsed.content, [(call.name, call.arguments) for call in parsed.tool_calls]) == (content, calls)
    assert not parsed.problems


def test_arguments_are_the_very_text_of_the_model():
    written = '{ "b":1.0,"a" : [1e400, 100000000000000000001], "ü":"\\u00fc" }'
    (call,) = parse(HERMES, f'<tool_call>{{"arguments": {written}, "name": "f"}}</tool_call>').tool_calls
    assert call == ToolCall("call_0", "f", written)
    (call,) = parse(HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>').tool_calls
    assert call.arguments == '{"a": 1}'
    (call,) = parse(HERMES, '<tool_call>{"name": "f"}</tool_call>').tool_calls
    assert call.arguments == "{}"


def test_ids_count_the_calls_and_mistrals_are_as_its_template_wants_them():
    assert [call.id for call in parse(HERMES, f"{WEATHER}{NOW}").tool_calls] == ["call_0", "call_1"]
    ids = [call.id for call in parse(MISTRAL, f"[{WEATHER}, {NOW}]").tool_calls]
    assert ids == ["call00000", "call00001"] and all(len(i) == 9 and i.isalnum() for i in ids)


@pytest.mark.parametrize(
    ("json_text", "why"),
    [
        ('{"name": "f", "arguments": {', "double quotes"),
        ('{"name": "f", "arguments": {}', "no end"),
        ("{'name': 'f'}", "Expecting value"),
        ('{"arguments": {}}', "name"),
        ('{"name": 1, "arguments": {}}', "name"),
        ('{"name": "\\ud800", "arguments": {}}', "name"),
        ('{"name": "f", "arguments": [1]}', "JSON object"),
        ('{"name": "f", "arguments": "x"}', "Expecting value"),
        ('{"name": "f", "arguments": "{} {}"}', "more than one"),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}', "surrogates"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN"),
        ('{"name": "f", "arguments": {}, "parameters": {}}', "once"),
        ('{"name": "f", "arguments": ' + '{"a":' * 100_000, "deep"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "digits"),
        ("[]", "no JSON object"),
        ("print('hello')", "no JSON object"),
        ("", "no JSON object"),
    ],
)
def test_what_is_no_complete_call_stays_content_with_the_reason(json_text, why):
    text = f"a <tool_call>{json_text}</tool_call> b"
    parsed = parse(HERMES, text)
    assert parsed.content == text and not parsed.tool_calls
    assert len(parsed.problems) == 1 and why in parsed.problems[0]
    good = parse(HERMES, f"{text}<tool_call>{NOW}</tool_call>")
    assert good.content == text and [call.name for call in good.tool_calls] == ["now"] and good.problems


@pytest.mark.parametrize(
    "text",
    [
        f"The call is {WEATHER}",
        f"{WEATHER} is the call",
        '{"name": "get_weather"}',
        '{"name": "get_weather", "arguments": {}, "age": 3}',
        '{"name": "Ada", "arguments": {}}',
        "[1, 2]",
        "{}",
    ],
)
def test_json_without_a_marker_is_an_answer_unless_it_is_nothing_but_calls_of_offered_tools(text):
    for form in FORMATS.values():
        assert parse(form, text, offered=("get_weather",)) == ParsedAnswer(text)


def test_a_marker_that_cannot_be_lost_is_needed():
    assert parse(FUNCTOOLS, f"[{NOW}]", offered=("now",)) == ParsedAnswer(f"[{NOW}]")


PIECES = (
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "<|tool_call|>",
    "functools",
    "[",
    "]",
    "{",
    "}",
)
PIECES += ('"name"', '"arguments"', ":", ",", ";", '"f"', WEATHER, NOW, "\n", "a", "\\", '"')
TEXTS = st.text(max_size=30) | st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@settings(deadline=None)
@given(TEXTS, st.sampled_from(sorted(FORMATS)))
@example("<tool_call>" * 50 + "{", "hermes")
@example("[" * 100_000, "mistral")
def test_any_text_is_parsed_and_nothing_is_lost_without_a_call(text, name):
    parsed = parse(FORMATS[name], text)
    if not parsed.tool_calls:
        assert parsed.content == text
    for call in parsed.tool_calls:
        assert call.name and isinstance(json.loads(call.arguments), dict) and call.arguments.encode()


NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(st.text(max_size=4), VALUES, max_size=3)), min_size=1, max_size=3)


def spell(name, calls):
    """An answer of these calls as the family writes it."""
    texts = [json.dumps({"name": call, "arguments": arguments}, ensure_ascii=False) for call, arguments in calls]
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    if name == "llama3_json":
        return "; ".join(texts)
    if name == "phi4_mini":
        return "".join(f"<|tool_call|>{text}<|/tool_call|>" for text in texts)
    return f"{FORMATS[name].markers[0]}[{', '.join(texts)}]"


@settings(deadline=None)
@given(st.sampled_from(sorted(FORMATS)), CALLS)
def test_calls_come_back_as_they_were_written(name, calls):
    parsed = parse(FORMATS[name], spell(name, calls))
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == calls
    assert parsed.content == ""

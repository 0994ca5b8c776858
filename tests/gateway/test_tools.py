"""Tools for a model whose template knows none. Wrong if a call were lost, invented, or shown as text."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tests.gateway.test_requests import USER, chat, messages_of
from tritonforge.gateway.api.errors import ApiError
from tritonforge.gateway.api.schemas import Tool
from tritonforge.gateway.api.tools import CallReader, ToolUse, call_grammar, write_plainly
from tritonforge.structured.tool_calls import ToolCall

SCHEMA = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"]}
SCHEMA |= {"additionalProperties": False, "$defs": {"city": {"enum": ["Paris", "Oslo"]}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
OFFERED = ToolUse([], {}, ("weather", "time"))


def split(text, cuts):
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(places)] or [""]


def read_all(use, pieces, native=()):
    reader, texts, calls = CallReader(use), [], ()
    for index, piece in enumerate(pieces):
        final = index == len(pieces) - 1
        text, calls = reader.push(piece, final=final, native=native if final else ())
        texts.append(text)
    return "".join(texts), calls


def accepts(grammar, text):
    """Whether the grammar allows exactly this text, byte by byte."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_of(tools, **fields):
    return chat(tools=tools, **fields).options["grammar"]


def test_the_model_is_told_of_its_functions_and_offered_text_or_calls():
    work = chat(tools=[WEATHER, TIME])
    said = messages_of(work)[0]
    assert said["role"] == "system" and "weather" in said["content"] and "Of a city." in said["content"]
    grammar = work.options["grammar"]
    for text in ("Hello", "", "<b>bold</b>", "a <tool_call> in the middle", CALL, f"{CALL}\n{CALL}"):
        assert accepts(grammar, text) == bool(text), text
    assert accepts(grammar, '<tool_call>{"name": "time", "arguments": {"any": 1}}</tool_call>')
    for text in (CALL.replace("Oslo", "Rome"), CALL.replace("weather", "whether"), CALL[:-3], f"{CALL} and more"):
        assert not accepts(grammar, text), text


def test_a_demanded_call_leaves_no_text_and_one_call_no_second():
    forced = grammar_of([WEATHER, TIME], tool_choice="required")
    assert accepts(forced, CALL) and accepts(forced, f"{CALL}\n{CALL}") and not accepts(forced, "Hello")
    single = grammar_of([WEATHER, TIME], tool_choice="required", parallel_tool_calls=False)
    assert accepts(single, CALL) and not accepts(single, f"{CALL}\n{CALL}")
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    one_of = grammar_of([WEATHER, TIME], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert accepts(one_of, CALL) and not accepts(one_of, CALL.replace("weather", "time"))


def test_a_named_functions_answer_is_its_arguments():
    work = chat(tools=[WEATHER, TIME], tool_choice={"type": "function", "function": {"name": "weather"}})
    assert json.loads(work.options["json_schema"]) == SCHEMA and "grammar" not in work.options
    text, (call,) = read_all(work.tools, ['{"city"', ': "Oslo"}'])
    assert (text, call.name, call.arguments) == ("", "weather", '{"city": "Oslo"}')
    assert "time" not in messages_of(work)[0]["content"]


def test_no_choice_leaves_the_answer_alone():
    work = chat(tools=[WEATHER], tool_choice="none")
    assert "grammar" not in work.options and messages_of(work) == [USER]
    assert read_all(work.tools, ["<tool_call>", "x"]) == ("<tool_call>x", ())


@given(st.text(max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_text_passes_whole_however_it_is_cut(text, cuts):
    if not text.startswith("<tool_call>"):
        assert read_all(OFFERED, split(text, cuts)) == (text, ())


@given(st.integers(1, 3), st.lists(st.integers(0, 250), max_size=8))
def test_calls_are_read_whole_however_they_are_cut_and_never_shown(count, cuts):
    text, calls = read_all(OFFERED, split("\n".join([CALL] * count), cuts))
    assert text == ""
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Oslo"})] * count
    assert len({call.id for call in calls}) == count


def test_text_is_passed_on_as_it_comes():
    reader = CallReader(OFFERED)
    assert [reader.push(piece, final=False)[0] for piece in ("<", "b>", "x", "<tool_call>")] == [
        "",
        "<b>",
        "x",
        "<tool_call>",
    ]


def test_a_call_that_was_cut_short_is_text_and_no_call():
    assert read_all(OFFERED, [CALL[:30]]) == (CALL[:30], ())


def test_a_template_that_writes_tools_gets_them_and_the_decoders_calls_count():
    work = chat(takes_tools=True, tools=[WEATHER])
    assert json.loads(work.prompts[0].options["tools"]) == [WEATHER]
    assert json.loads(work.options["tools"]) == [WEATHER] and "grammar" not in work.options
    call = ToolCall("call_0", "weather", '{"city": "Oslo"}')
    assert read_all(work.tools, ["<tool", "_call>..."], (call,)) == ("", (call,))
    assert read_all(work.tools, ["Hel", "lo"]) == ("Hello", ())
    for fields in ({"tool_choice": "required"}, {"parallel_tool_calls": False}):
        with pytest.raises(ApiError) as told:
            chat(takes_tools=True, tools=[WEATHER], **fields)
        assert told.value.param in fields


def test_earlier_calls_and_results_are_written_as_the_instruction_asks():
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    said = write_plainly({"role": "assistant", "content": None, "tool_calls": [call]})
    assert said == {"role": "assistant", "content": CALL}
    assert write_plainly({"role": "tool", "tool_call_id": "1", "content": "Snow."}) == {
        "role": "user",
        "content": "<tool_response>Snow.</tool_response>",
    }
    history = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    assert messages_of(chat(messages=history))[1] == {"role": "assistant", "content": CALL}


def test_a_function_without_parameters_takes_any_object():
    grammar = call_grammar([Tool.model_validate(TIME)], forced=True, several=False)
    assert accepts(grammar, '<tool_call>{"name": "time", "arguments": {}}</tool_call>')


def test_arguments_are_the_functions_parameters_and_no_others_unless_its_schema_allows_them():
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    more = '<tool_call>{"name": "f", "arguments": {"city": "Oslo", "x": 1}}</tool_call>'
    for schema, allowed in ((city, False), (city | {"additionalProperties": True}, True)):
        tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})
        assert accepts(call_grammar([tool], forced=True, several=False), more) == allowed

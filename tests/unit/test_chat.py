"""Chats: which messages, tools and templates are taken, and which are refused, by place, value and rule."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonforge.chat import ChatTemplate
from tritonforge.errors import InvalidCheckpoint, InvalidRequest
from tritonforge.messages import parse_messages, parse_tools

TEMPLATES = Path(__file__).resolve().parents[1] / "chat_templates"

USER = {"role": "user", "content": "a"}
CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def with_call(**changes):
    return [{"role": "assistant", "tool_calls": [{**CALL, **changes}]}]


def with_function(**changes):
    return with_call(function={**CALL["function"], **changes})


def with_tool(**changes):
    return [{**TOOL, "function": {**TOOL["function"], **changes}}]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("hello", "messages must be JSON"),
        ("[" * 100_000, "JSON"),
        ("[" + "9" * 5000 + "]", "JSON"),
        ('[{"role": "user", "content": "\\ud800"}]', "JSON"),
        ([], "at least one element"),
        (USER, "messages must be a JSON list"),
        (["hi"], "messages[0] must be a JSON object"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "a"}], "messages[0].role must be one of system, user, assistant, tool, got None"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        ([USER, {"role": "developer", "content": "b"}], "messages[1].role"),
        ([{**USER, "name": "b"}], "messages[0] has the unknown key 'name'"),
        ([{**USER, "tool_calls": [CALL]}], "messages[0] has the unknown key 'tool_calls'"),
        ([{**USER, "content": 1}], "messages[0].content must be a string"),
        ([{**USER, "content": None}], "messages[0].content"),
        ([{**USER, "content": []}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": None}], "messages[0].content"),
        ([{**USER, "content": [{"type": "image_url", "image_url": {}}]}], "content[0].type must be text"),
        ([{**USER, "content": [{"type": "text", "text": 1}]}], "content[0].text"),
        ([{**USER, "content": [{"type": "text", "text": "a", "x": 1}]}], "content[0] has the unknown key 'x'"),
        ([{**USER, "content": ["a"]}], "content[0] must be a JSON object"),
        ([{"role": "assistant", "tool_calls": []}], "tool_calls must be a list with at least one"),
        (with_call(id=1), "tool_calls[0].id"),
        (with_call(type="custom"), "tool_calls[0].type must be function"),
        (with_call(index=0), "unknown key 'index'"),
        (with_call(function="f"), "tool_calls[0].function must be a JSON object"),
        (with_function(name="a b"), "tool_calls[0].function.name"),
        (with_function(arguments="{"), "tool_calls[0].function.arguments must be JSON"),
        (with_function(arguments="[]"), "tool_calls[0].function.arguments must be a JSON object"),
        ([{"role": "tool", "content": "a", "tool_call_id": 1}], "messages[0].tool_call_id"),
        ([{"role": "tool", "tool_call_id": "a"}], "messages[0].content"),
    ],
)
def test_messages_that_break_a_rule_are_refused_by_place(value, words):
    with pytest.raises(InvalidRequest) as refused:
        parse_messages(value if isinstance(value, str) else json.dumps(value))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "tools must be JSON"),
        ([], "tools must be a JSON list"),
        ([{"type": "function"}], "tools[0] must have the key function"),
        ([{**TOOL, "type": "retrieval"}], "tools[0].type must be function"),
        ([{**TOOL, "x": 1}], "tools[0] has the unknown key 'x'"),
        (with_tool(name=""), "tools[0].function.name"),
        (with_tool(name="a" * 65), "tools[0].function.name"),
        (with_tool(description=1), "tools[0].function.description"),
        (with_tool(parameters=[]), "tools[0].function.parameters must be a JSON schema"),
        (with_tool(parameters={"type": "string"}), "tools[0].function.parameters"),
        (with_tool(parameters={"type": "object", "properties": []}), "parameters.properties"),
        (with_tool(parameters={"type": "object", "properties": {"a": 1}}), "parameters.properties"),
        (with_tool(parameters={"type": "object", "required": "a"}), "parameters.required"),
        (with_tool(strict=True), "tools[0].function.strict must be false"),
        ([TOOL, TOOL], "tools[1].function.name must be unique"),
    ],
)
def test_tools_that_break_a_rule_are_refused_by_place(value, words):
    with pytest.raises(InvalidRequest) as refused:
        parse_tools(value if isinstance(value, str) else json.dumps(value))
    assert words in str(refused.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [
        *("role", "content", "tool_calls", "tool_call_id", "name", "type", "text", "id", "function", "arguments"),
        *("description", "parameters", "properties", "required", "strict", "reasoning_content"),
    ]
)
WORDS = st.sampled_from(("system", "user", "assistant", "tool", "function", "object", "text", "f", "{}"))
NEARLY = st.recursive(
    JSON | WORDS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=20
)


@settings(deadline=None)
@given(st.text(max_size=40) | NEARLY.map(json.dumps) | st.lists(NEARLY, min_size=1, max_size=3).map(json.dumps))
def test_any_json_is_taken_or_refused_with_a_typed_error(value):
    for parse in (parse_messages, parse_tools):
        try:
            parsed = parse(value)
        except InvalidRequest:
            continue
        assert parsed and all(isinstance(item, dict) for item in parsed)


def test_what_clients_write_in_several_ways_reaches_the_template_in_one():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    sent = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    sent += [{"role": "tool", "content": "1", "tool_call_id": "call_0", "name": None}]
    user, assistant, result = parse_messages(json.dumps(sent))
    assert user == {"role": "user", "content": "a\nb"}
    assert assistant["content"] is None and assistant["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert result == {"role": "tool", "content": "1", "tool_call_id": "call_0"}
    assert parse_messages('[{"role": "assistant", "content": "a", "tool_calls": null}]') == [
        {"role": "assistant", "content": "a"}
    ]
    assert parse_tools(json.dumps(with_tool(strict=False))) == [TOOL]


def test_a_template_may_use_what_transformers_offers_and_a_bad_one_is_the_checkpoints_fault():
    source = (
        "{% set today = strftime_now('%Y') %}{{ bos_token }}{{ today }}{% for m in messages %}{% if loop.index > 1 %}"
        "{% break %}{% endif %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{% if not add_generation_prompt %}{{ raise_exception('no prompt') }}{% endif %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"}, strftime=lambda form: f"date {form}")
    messages = [{"role": "user", "content": "é<"}, {"role": "user", "content": "b"}]
    shown = template.render(messages, add_generation_prompt=True)
    assert shown == '<s>date %Y{"role": "user", "content": "é<"}'
    with pytest.raises(InvalidRequest, match="no prompt"):
        template.render(messages, add_generation_prompt=False)
    with pytest.raises(InvalidCheckpoint, match="does not compile"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 'a' }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].name.first }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages[0].__class__.__mro__ }}",
    ],
)
def test_a_template_that_fails_on_the_messages_refuses_them(source):
    with pytest.raises(InvalidRequest, match="do not fit"):
        ChatTemplate(source, {}).render([{"role": "assistant", "content": None}], add_generation_prompt=True)


def test_a_template_that_does_not_write_tools_calls_or_reasoning_is_not_given_them():
    plain = ChatTemplate("{% set tools = 1 %}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}", {})
    with pytest.raises(InvalidRequest, match="does not take tools"):
        plain.render([USER], tools=[TOOL], add_generation_prompt=True)
    for key, value in (("tool_calls", [CALL]), ("reasoning_content", "hm")):
        with pytest.raises(InvalidRequest, match=f"must have no {key}"):
            plain.render([{"role": "assistant", "content": "a", key: value}], add_generation_prompt=True)


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_templates_of_known_families_are_seen_to_take_tools_or_not(path):
    template = ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})
    tools = parse_tools(json.dumps([TOOL]))
    if path.stem in ("chatml", "phi3"):
        with pytest.raises(InvalidRequest, match="does not take tools"):
            template.render([USER], tools=tools, add_generation_prompt=True)
    else:
        assert '"properties": {}' in template.render([USER], tools=tools, add_generation_prompt=True)


def test_a_folder_with_two_templates_renders_tools_with_the_second(tmp_path):
    assert ChatTemplate.read(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("plain{{ bos_token }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tool")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}, "add_bos_token": true}')
    template = ChatTemplate.read(tmp_path)
    assert template.render([USER], add_generation_prompt=True) == "plain<s>"
    assert template.render([USER], tools=[TOOL], add_generation_prompt=True) == "1 tool"
    assert template.tool_source == "{{ tools | length }} tool"

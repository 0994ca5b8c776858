"""A chat is spelled and tokenized exactly as transformers does it, for templates of many model families."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from tiny_checkpoint import write_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from tritonforge.chat import ChatTemplate
from tritonforge.errors import InvalidRequest
from tritonforge.messages import parse_messages, parse_tools
from tritonforge.text import Tokenizer

TEMPLATES = Path(__file__).resolve().parents[1] / "chat_templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
WITH_TOOLS = sorted(set(NAMES) - {"chatml", "phi3"})
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
NOW = datetime(2026, 2, 28, 12)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather of a city: <b>"now"</b> & später',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]

CALL = {"id": "call00000", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
SYSTEM = {"role": "system", "content": "Be brief. "}
USER = {"role": "user", "content": " What's the <weather>?\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSunny ☀️"}
USED_TOOL = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sun": true}', "tool_call_id": "call00000", "name": "get_weather"},
]

CHATS = {
    "one question": [USER],
    "a system message": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "ok\u2028é"}],
    "an answer at the end": [USER, ANSWER],
    "no content": [{"role": "user", "content": ""}],
}
TOOL_CHATS = {
    "one question": [USER],
    "a tool's result": [SYSTEM, USER, *USED_TOOL],
    "an answer from a tool": [USER, *USED_TOOL, ANSWER, USER],
}


class FixedNow(datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


@pytest.fixture(autouse=True)
def same_day(monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", FixedNow)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer without a template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **SPECIAL)


def source_of(name):
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def ours(name, messages, tools, add_generation_prompt):
    """What the served tokenizer renders for the JSON that a client sends."""
    template = ChatTemplate(source_of(name), SPECIAL, strftime=NOW.strftime)
    messages = parse_messages(json.dumps(messages))
    tools = None if tools is None else parse_tools(json.dumps(tools))
    return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)


def theirs(reference, name, messages, tools, add_generation_prompt):
    return reference.apply_chat_template(
        messages,
        tools=tools,
        chat_template=source_of(name),
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
    )


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", NAMES)
def test_a_chat_reads_as_transformers_writes_it(reference, name, chat, add_generation_prompt):
    asked = (name, CHATS[chat], None, add_generation_prompt)
    assert ours(*asked) == theirs(reference, *asked)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", TOOL_CHATS)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_calls_and_results_read_as_transformers_writes_them(reference, name, chat, add_generation_prompt):
    asked = (name, TOOL_CHATS[chat], TOOLS, add_generation_prompt)
    assert ours(*asked) == theirs(reference, *asked)
    assert "get_weather" in ours(*asked)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_arguments_sent_as_json_text_read_as_the_object(name):
    as_text = json.loads(json.dumps(TOOL_CHATS["a tool's result"]))
    function = as_text[2]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    assert ours(name, as_text, TOOLS, True) == ours(name, TOOL_CHATS["a tool's result"], TOOLS, True)


@pytest.mark.parametrize("name", ["chatml", "phi3"])
def test_a_template_without_tools_would_leave_them_out_and_is_refused(reference, name):
    assert "get_weather" not in theirs(reference, name, [USER], TOOLS, True)
    with pytest.raises(InvalidRequest, match="does not take tools"):
        ours(name, [USER], TOOLS, True)


@pytest.mark.parametrize("name", ["llama3", "mistral", "phi3"])
def test_what_a_template_refuses_for_transformers_is_refused_here(reference, name):
    bad = {"llama3": [USER, {**USED_TOOL[0], "tool_calls": [CALL, CALL]}], "mistral": [USER, USER], "phi3": [USER]}[
        name
    ]
    if name == "phi3":
        bad = [*bad, USED_TOOL[1]]
    with pytest.raises(Exception, match=r"one tool call|take turns|Unknown role"):
        theirs(reference, name, bad, None, True)
    with pytest.raises(InvalidRequest, match=r"one tool call|take turns|Unknown role"):
        ours(name, bad, None, True)


TWO = {
    "default": "{{ bos_token }}plain {{ messages[0].content }}",
    "tool_use": "{{ tools[0].function.name }}{{ bos_token }}",
}


def stored_in_config(folder, tokenizer):
    config = {**SPECIAL, "chat_template": [{"name": name, "template": source} for name, source in TWO.items()]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def stored_by_transformers(folder, tokenizer):
    tokenizer.chat_template = TWO
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("store", [stored_in_config, stored_by_transformers])
def test_named_templates_are_found_and_chosen_as_transformers_does(folder, tmp_path, store):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **SPECIAL)
    tokenizer.save_pretrained(tmp_path)
    store(tmp_path, tokenizer)
    loaded, served = PreTrainedTokenizerFast.from_pretrained(tmp_path), Tokenizer(tmp_path)
    for tools in (None, TOOLS):
        expected = loaded.apply_chat_template([USER], tools=tools, add_generation_prompt=True, return_dict=False)
        assert served.encode_chat([USER], tools) == expected


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_token_ids_are_those_of_transformers(folder, tmp_path, name):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    source = source_of(name).replace("strftime_now(", "'%d' or (")
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    loaded, served = PreTrainedTokenizerFast.from_pretrained(tmp_path), Tokenizer(tmp_path)
    chat = TOOL_CHATS["an answer from a tool"]
    expected = loaded.apply_chat_template(chat, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert served.encode_chat(chat, TOOLS) == expected


@pytest.mark.parametrize(
    ("source", "special"),
    [
        ("{{ bos_token is defined }}{{ sep_token is defined }}", {"bos_token": "<|im_start|>", "sep_token": None}),
        ("{{ image_token }}", {"image_token": "<|endoftext|>"}),
        ("{{ unk_token }}", {"unk_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}}),
        ("{{ tools is none }}{{ documents is none }}{{ enable_thinking is defined }}", {}),
        ("{% for m in messages %}{% generation %}{% set a = 1 %}{% endgeneration %}{{ a is defined }}{% endfor %}", {}),
        ("{% for m in messages %}{{ m | tojson(indent=2, sort_keys=true) }}{% break %}{% endfor %}", {}),
        ("{{ messages | tojson(separators=(',', ':')) }}{{ messages[0] | tojson(true) }}", {}),
    ],
)
def test_templates_see_the_variables_and_filters_of_transformers(folder, tmp_path, source, special):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    (tmp_path / "chat_template.jinja").write_text(source)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "é<"}]
    expected = loaded.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert ChatTemplate.read(tmp_path).render(chat, add_generation_prompt=True) == expected

"""Every field of OpenAI's two requests, one by one, sent to the gateway: honoured with an effect, or refused by name.

Wrong if it failed: a client's field would be dropped without a word.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.serving import MODEL, await_metrics
from tritonforge.gateway.api.fields import CHAT, COMPLETIONS

pytestmark = pytest.mark.server

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Name three colours."}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
HALF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["Rome"]}}}
SAMPLED = {"temperature": 2.0, "seed": 1}

Told = dict[str, Any]
Check = Callable[[Told, Told], bool]


def text(told: Told) -> str:
    choice = told["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def tokens(told: Told) -> int:
    return told["usage"]["completion_tokens"]


LONG = {"max_tokens": 60}
"""Long enough for words to come back, which penalties then act on."""

BOTH: dict[str, tuple[Told, Check]] = {
    "model": ({}, lambda got, plain: got["model"] == MODEL),
    "frequency_penalty": (LONG | {"frequency_penalty": 2}, lambda got, plain: text(got) != text(plain)),
    "presence_penalty": (LONG | {"presence_penalty": 2}, lambda got, plain: text(got) != text(plain)),
    "logit_bias": ({"logit_bias": {"28": 100}}, lambda got, plain: set(text(got)) == {","}),
    "n": ({"n": 2}, lambda got, plain: [one["index"] for one in got["choices"]] == [0, 1]),
    "seed": (SAMPLED, lambda got, plain: text(got) != text(plain)),
    "stop": ({"stop": ["."]}, lambda got, plain: text(got) == text(plain).partition(".")[0] != text(plain)),
    "temperature": ({"temperature": 2, "seed": 1}, lambda got, plain: text(got) != text(plain)),
    "top_p": (SAMPLED | {"top_p": 1e-6}, lambda got, plain: text(got) == text(plain)),
    "max_tokens": ({"max_tokens": 2}, lambda got, plain: tokens(got) == 2),
    # an option of the models, beside OpenAI's fields
    "top_k": (SAMPLED | {"top_k": 1}, lambda got, plain: text(got) == text(plain)),
    "min_p": (SAMPLED | {"min_p": 1}, lambda got, plain: text(got) == text(plain)),
    "repetition_penalty": ({"repetition_penalty": 5}, lambda got, plain: text(got) != text(plain)),
    "min_tokens": ({"min_tokens": 9, "logit_bias": {"2": 100}}, lambda got, plain: tokens(got) == 10),
    "ignore_eos": ({"ignore_eos": True, "logit_bias": {"2": 100}}, lambda got, plain: tokens(got) == tokens(plain)),
}
IN_CHAT: dict[str, tuple[Told, Check]] = {
    "messages": (
        {"messages": [{"role": "developer", "content": "Answer in French."}, *MESSAGES]},
        lambda got, plain: got["usage"]["prompt_tokens"] != plain["usage"]["prompt_tokens"],
    ),
    "max_completion_tokens": ({"max_tokens": None, "max_completion_tokens": 2}, lambda got, plain: tokens(got) == 2),
    "logprobs": ({"logprobs": True}, lambda got, plain: len(got["choices"][0]["logprobs"]["content"]) == tokens(got)),
    "top_logprobs": (
        {"logprobs": True, "top_logprobs": 3},
        lambda got, plain: [len(one["top_logprobs"]) for one in got["choices"][0]["logprobs"]["content"]] == [3] * 12,
    ),
    "modalities": ({"modalities": ["text"]}, lambda got, plain: text(got) == text(plain)),
    "parallel_tool_calls": (
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60},
        lambda got, plain: len(got["choices"][0]["message"]["tool_calls"]) == 1,
    ),
    "response_format": ({"response_format": HALF_SCHEMA}, lambda got, plain: json.loads(text(got)) == "Rome"),
    "service_tier": ({"service_tier": "flex"}, lambda got, plain: got["service_tier"] == "flex"),
    "store": ({"store": False}, lambda got, plain: text(got) == text(plain)),
    "tool_choice": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "max_tokens": 60},
        lambda got, plain: got["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f",
    ),
    "tools": (
        {"tools": [TOOL]},
        lambda got, plain: got["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 20,
    ),
}
IN_COMPLETIONS: dict[str, tuple[Told, Check]] = {
    "prompt": ({"prompt": [[504, 3575], [504, 3575, 282]]}, lambda got, plain: len(got["choices"]) == 2),
    "echo": ({"echo": True}, lambda got, plain: text(got) == PROMPT + text(plain)),
    "logprobs": ({"logprobs": 2}, lambda got, plain: len(got["choices"][0]["logprobs"]["tokens"]) == 12),
}
OTHERWISE = {"stream", "stream_options", "user", "safety_identifier"}
"""Fields whose effect a test of their own shows."""
ILL_VALUES = {
    "modalities": ["audio"],
    "service_tier": "priority",
    "store": True,
    "stream_options": {"include_obfuscation": True},
    "temperature": 2.1,
    "top_p": 1.1,
    "n": 17,
    "seed": -1,
    "stop": [],
    "logit_bias": {"5": 101},
    "response_format": {"type": "xml"},
    "tools": [{"type": "custom", "custom": {"name": "x"}}],
    "tool_choice": {"type": "custom", "custom": {"name": "x"}},
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    "prompt": {"text": "x"},
}
"""A value of an honoured field that is refused, where another type than the field's would not show it."""

PATHS = {
    "/v1/chat/completions": (CHAT, {"messages": MESSAGES, "max_tokens": 12}, BOTH | IN_CHAT),
    "/v1/completions": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 12}, BOTH | IN_COMPLETIONS),
}
FIELDS = [(path, field.name, field.honoured) for path, (table, _, _) in PATHS.items() for field in table]
EXTENSIONS = [
    (path, name) for path in PATHS for name in ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos")
]


@pytest.fixture(scope="module")
def post(http):
    """post(path, fields): status and body of a greedy request with these fields beside the plain ones."""

    def post(path: str, fields: Told) -> tuple[int, Told]:
        body = {"model": MODEL, "temperature": 0} | PATHS[path][1] | fields
        answer = http.post(path, json=body)
        return answer.status_code, answer.json()

    return post


@pytest.fixture(scope="module")
def plain(post):
    return {path: post(path, {})[1] for path in PATHS}


@pytest.mark.parametrize(("path", "name", "honoured"), FIELDS)
def test_each_field_is_honoured_or_refused_by_name(post, plain, path, name, honoured):
    effects = PATHS[path][2]
    if honoured and name in OTHERWISE:
        return
    if not honoured:
        status, told = post(path, {name: "x"})
        assert (status, told["error"]["param"]) == (400, name)
        assert name in told["error"]["message"]
        return
    fields, shows = effects[name]
    status, told = post(path, fields)
    assert status == 200, told
    assert shows(told, post(path, LONG)[1] if "penalty" in name else plain[path])


@pytest.mark.parametrize(("path", "name"), EXTENSIONS)
def test_each_option_beside_openais_fields_is_honoured(post, plain, path, name):
    fields, shows = BOTH[name]
    status, told = post(path, fields)
    assert status == 200 and shows(told, plain[path])


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, name, honoured in FIELDS if honoured])
def test_an_ill_value_of_each_field_is_refused_with_the_fields_name(post, path, name):
    extra = {"stream": True} if name == "stream_options" else {}
    status, told = post(path, {name: ILL_VALUES.get(name, {"no": "such form"})} | extra)
    assert status == 400
    assert told["error"]["param"].split(".")[0].split("[")[0] == name
    assert set(told["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", PATHS)
def test_no_token_is_guessed_for_who_says_so(server, post, path):
    def settled():
        """The metrics once they know of all that has ended: after the next sign of life, which comes each second."""
        seen = await_metrics(server, bool)["heartbeat_timestamp_seconds"]
        return await_metrics(server, lambda told: told["heartbeat_timestamp_seconds"] > seen)

    again = LONG | {"ignore_eos": True, "logit_bias": {"28": 100}}
    before = settled()
    assert post(path, again | {"speculate": False})[0] == 200
    after = settled()
    assert after["generation_tokens_total"] == before["generation_tokens_total"] + LONG["max_tokens"]
    assert after["drafts_total"] == before["drafts_total"]
    assert post(path, again)[0] == 200
    assert settled()["drafts_total"] > before["drafts_total"]


def test_an_unknown_field_is_refused_by_name(post):
    status, told = post("/v1/chat/completions", {"no_such_field": 1})
    assert (status, told["error"]["param"], told["error"]["code"]) == (400, "no_such_field", "unknown_parameter")


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
def test_who_asked_is_in_the_record(gateway, post, field):
    seen = len(gateway.records)
    assert post("/v1/chat/completions", {field: f"somebody-{field}", "max_tokens": 1})[0] == 200
    assert gateway.await_records(seen + 1)[-1].user == f"somebody-{field}"


def test_fields_that_exclude_each_other_are_refused(post):
    chat = "/v1/chat/completions"
    for fields in (
        {"max_completion_tokens": 5},
        {"top_logprobs": 2},
        {"stream_options": {"include_usage": True}},
        {"tool_choice": "required"},
        {"tools": [TOOL], "response_format": HALF_SCHEMA},
        {"tools": [TOOL, TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    ):
        status, told = post(chat, fields)
        assert status == 400 and told["error"]["param"], fields


def test_what_only_the_model_can_judge_is_refused_with_a_name_too(post):
    chat = "/v1/chat/completions"
    status, told = post(chat, {"logit_bias": {"49152": 1}})
    assert (status, told["error"]["param"]) == (422, "logit_bias")
    status, told = post(chat, {"max_tokens": 4096})
    assert (status, told["error"]["code"], told["error"]["param"]) == (400, "context_length_exceeded", "max_tokens")

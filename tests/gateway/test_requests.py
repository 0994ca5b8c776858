"""From a request's bytes to what the models are asked, without a server. Wrong if a field were read as another, a bad
body crashed, or an error named the wrong place.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonforge.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    NotFound,
    Overloaded,
    TritonForgeError,
)
from tritonforge.gateway.api.bodies import read
from tritonforge.gateway.api.errors import ApiError, of_model_error
from tritonforge.gateway.api.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from tritonforge.gateway.config import Tenant
from tritonforge.gateway.work import of_chat, of_completion, of_tokenize
from tritonforge.options import parse_options

ACME = Tenant("acme", priority_class=3)
USER = {"role": "user", "content": "Hello"}


def chat(takes_tools=False, **fields):
    asked = read(ChatRequest, json.dumps({"model": "m", "messages": [USER]} | fields).encode())
    return of_chat(asked, ACME, takes_tools=takes_tools)


def completion(**fields):
    asked = read(CompletionRequest, json.dumps({"model": "m", "prompt": "x"} | fields).encode())
    return of_completion(asked, ACME, max_prompts=4)


def refusal(kind, body):
    with pytest.raises(ApiError) as told:
        read(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    return told.value


def messages_of(work):
    return json.loads(work.prompts[0].options["messages"])


def test_every_option_that_is_sent_is_one_that_the_models_take():
    work = chat(
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop=["a", "b"],
        logit_bias={"5": 1},
        n=2,
        logprobs=True,
        top_logprobs=3,
        presence_penalty=1,
        frequency_penalty=-1,
        top_k=5,
        min_p=0.1,
        stream=True,
        response_format={"type": "json_object"},
    )
    options = work.options | {"stop": json.dumps(work.options["stop"])}
    values = parse_options(options)
    assert values["stop"] == ("a", "b") and values["logit_bias"] == ((5, 1.0),) and values["json_object"]
    assert (values["temperature"], values["top_k"], values["n"], values["logprobs"]) == (0.5, 5, 2, 3)
    assert (values["tenant"], values["cache_salt"], values["priority"]) == ("acme", "acme", 3)


def test_openais_defaults_hold_and_not_the_models():
    assert chat().options["temperature"] == 1 and chat().max_tokens is None
    assert completion().options["temperature"] == 1 and completion().max_tokens == 16


def test_a_developer_is_the_system_and_parts_stay():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    work = chat(messages=[{"role": "developer", "content": "d"}, {"role": "user", "content": parts}])
    assert messages_of(work) == [{"role": "system", "content": "d"}, {"role": "user", "content": parts}]


def test_a_schemas_description_reaches_the_model_and_the_schema_its_option():
    form = {
        "type": "json_schema",
        "json_schema": {"name": "city", "description": "A city.", "schema": {"type": "string"}},
    }
    work = chat(response_format=form, messages=[{"role": "system", "content": "Be brief."}, USER])
    assert json.loads(work.options["json_schema"]) == {"type": "string"}
    assert messages_of(work)[0]["content"] == "Be brief.\n\nAnswer in the JSON format city: A city."


def test_prompts_of_all_four_forms_are_told_apart():
    assert [one.text for one in completion(prompt=["a", "b"]).prompts] == ["a", "b"]
    assert [one.token_ids for one in completion(prompt=[1, 2]).prompts] == [(1, 2)]
    assert [one.token_ids for one in completion(prompt=[[1], [2]]).prompts] == [(1,), (2,)]
    for prompt in ("", [""], ["a"] * 5):
        with pytest.raises(ApiError) as told:
            completion(prompt=prompt)
        assert told.value.param == "prompt"


def test_the_tokenizer_is_told_how_to_cut_and_the_decoder_is_not():
    work = chat(truncate="oldest", max_completion_tokens=9)
    assert work.prompts[0].options["truncate"] == "oldest" and work.prompts[0].options["max_tokens"] == 9
    assert "truncate" not in work.options
    with pytest.raises(ApiError) as told:
        completion(prompt=[1, 2], truncate="oldest")
    assert told.value.param == "truncate"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"messages": [USER]}, "model", "missing_required_parameter"),
        ({"model": "m", "messages": []}, "messages", "invalid_value"),
        ({"model": "m", "messages": [{"role": "king", "content": "x"}]}, "messages[0]", "invalid_value"),
        ({"model": "m", "messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"model": "m", "messages": [USER | {"name": "x"}]}, "messages[0].name", "unknown_parameter"),
        ({"model": "m", "messages": [USER], "n": True}, "n", "invalid_value"),
        ({"model": "m", "messages": [USER], "n": "2"}, "n", "invalid_value"),
        ({"model": "m", "messages": [USER], "stop": ["a", 1]}, "stop[1]", "invalid_value"),
        ({"model": "m", "messages": [USER], "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        (
            {"model": "m", "messages": [USER], "response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing_required_parameter",
        ),
        ({"model": "m", "messages": [USER], "metadata": {}}, "metadata", "unsupported_parameter"),
    ],
)
def test_a_refusal_names_the_place(body, param, code):
    error = refusal(ChatRequest, body)
    assert (error.status, error.param, error.code) == (400, param, code)
    assert param in error.message


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": NaN}', b'{"a": 1e999}', b'"\\ud800"', b"[" * 100_000, b"1" * 5000],
)
def test_what_is_no_json_object_is_refused_and_never_a_failure(body):
    error = refusal(ChatRequest, body)
    assert (error.status, error.code) == (400, "invalid_json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields})


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5), st.booleans())
def test_any_json_in_any_field_is_read_or_refused_by_the_api(fields, valid_messages):
    base = {"model": "m"} | ({"messages": [USER]} if valid_messages else {"prompt": "x"})
    for kind, plan in ((ChatRequest, chat), (CompletionRequest, completion)):
        try:
            read(kind, json.dumps(base | fields).encode(errors="surrogatepass"))
            plan(**fields)
        except ApiError as error:
            assert error.status == 400 and error.message


def test_one_of_a_text_and_a_chat_is_tokenized():
    def plan(**fields):
        asked = read(TokenizeRequest, json.dumps({"model": "m"} | fields).encode())
        return of_tokenize(asked, takes_tools=False)

    assert plan(prompt="x").text == "x"
    assert json.loads(plan(messages=[USER], add_generation_prompt=False).options["messages"]) == [USER]
    for fields in ({}, {"prompt": "x", "messages": [USER]}, {"prompt": "x", "add_generation_prompt": True}):
        with pytest.raises(ApiError):
            plan(**fields)


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (InvalidRequest("top_k must be in [0, 9], got 10"), 422, "invalid_value", "top_k"),
        (InvalidRequest("json_schema must be a JSON schema"), 422, "invalid_value", "response_format"),
        (InvalidRequest("messages[2].content must be a string"), 422, "invalid_value", "messages[2].content"),
        (
            InvalidRequest("the prompt must be shorter than max_model_len 8 tokens, got 9"),
            400,
            "context_length_exceeded",
            None,
        ),
        (Overloaded("the queue is full; retry in about 7 s"), 503, "unavailable", None),
        (DeadlineExceeded("timeout_ms 5 passed"), 504, "timeout", None),
        (Cancelled("ended from outside"), 503, "unavailable", None),
        (NotFound("unknown model"), 503, "unavailable", None),
        (EngineFailure("/secret/path exploded"), 500, "internal_error", None),
        (TritonForgeError("/secret/path exploded"), 500, "internal_error", None),
    ],
)
def test_an_error_of_a_model_has_a_status_a_code_and_no_internals(error, status, code, param):
    told = of_model_error(error)
    assert (told.status, told.code, told.param) == (status, code, param)
    assert "secret" not in told.message
    assert (told.headers.get("Retry-After") is not None) == (status == 503)


def test_a_full_queues_own_time_is_the_one_to_come_back_after():
    assert of_model_error(Overloaded("full; retry in about 7 s")).headers["Retry-After"] == "7"

"""What a request may ask: every bad option is refused with its name, its value and its rule."""

import math

import pytest

from tritonforge.errors import InvalidRequest
from tritonforge.generate_request import GenerateRequest, Limits
from tritonforge.options import OPTIONS, STRUCTURES, parse_options
from tritonforge.scheduling.request import Request

LIMITS = Limits(max_model_len=64, vocab_size=100)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, ["max_tokens", "got 0"]),
        ({"max_tokens": 62}, ["max_tokens", "[1, 61]", "got 62"]),
        ({"max_tokens": True}, ["max_tokens", "got True"]),
        ({"max_tokens": "8"}, ["max_tokens", "got '8'"]),
        ({"max_tokens": 1.5}, ["max_tokens", "got 1.5"]),
        ({"temperature": -1}, ["temperature", "[0, 100]", "got -1"]),
        ({"temperature": math.nan}, ["temperature", "got nan"]),
        ({"temperature": math.inf}, ["temperature", "got inf"]),
        ({"temperature": None}, ["temperature", "got None"]),
        ({"top_p": 2}, ["top_p", "(0, 1]", "got 2"]),
        ({"top_p": 0.0}, ["top_p", "got 0.0"]),
        ({"top_k": -1}, ["top_k", "got -1"]),
        ({"top_k": 101}, ["top_k", "[0, 100]", "got 101"]),
        ({"seed": 2**63}, ["seed", f"got {2**63}"]),
        ({"stop": ""}, ["stop", "got ''"]),
        ({"stop": "[]"}, ["stop", "1 to 16 strings"]),
        ({"stop": "[1]"}, ["stop", "got '[1]'"]),
        ({"stop": "[oops"}, ["stop", "JSON"]),
        ({"stop": "x" * 257}, ["stop", "256"]),
        ({"ignore_eos": 1}, ["ignore_eos", "true or false", "got 1"]),
        ({"stream": "yes"}, ["stream", "got 'yes'"]),
        ({"stop": "[[]]"}, ["stop", "got '[[]]'"]),
        ({"stop": "[" * 100_000}, ["stop", "JSON", "got '[["]),
        ({"stop": '["\\ud800"]'}, ["stop", "JSON"]),
        ({"stop": "\ud800"}, ["stop", "got"]),
        ({"min_tokens": -1}, ["min_tokens", "[0, max_tokens]", "got -1"]),
        ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens", "[0, 8]", "got 9"]),
        ({"stop_token_ids": "7"}, ["stop_token_ids", "JSON list", "got '7'"]),
        ({"stop_token_ids": "[]"}, ["stop_token_ids", "got '[]'"]),
        ({"stop_token_ids": "[true]"}, ["stop_token_ids", "got '[true]'"]),
        ({"stop_token_ids": "[100]"}, ["stop_token_ids", "[0, 99]", "got 100"]),
        ({"stop_token_ids": "[-1]"}, ["stop_token_ids", "got '[-1]'"]),
        ({"include_stop_in_output": 0}, ["include_stop_in_output", "true or false"]),
        ({"min_p": 1.1}, ["min_p", "[0, 1]", "got 1.1"]),
        ({"repetition_penalty": 0}, ["repetition_penalty", "(0, 10]", "got 0"]),
        ({"repetition_penalty": 11.0}, ["repetition_penalty", "got 11.0"]),
        ({"presence_penalty": -2.1}, ["presence_penalty", "[-2, 2]", "got -2.1"]),
        ({"frequency_penalty": 3}, ["frequency_penalty", "[-2, 2]", "got 3"]),
        ({"logit_bias": "[1]"}, ["logit_bias", "JSON object", "got '[1]'"]),
        ({"logit_bias": "{}"}, ["logit_bias", "got '{}'"]),
        ({"logit_bias": '{"a": 1}'}, ["logit_bias", "token ids"]),
        ({"logit_bias": '{"1": "2"}'}, ["logit_bias", "number"]),
        ({"logit_bias": '{"1": true}'}, ["logit_bias", "number"]),
        ({"logit_bias": '{"1": 101}'}, ["logit_bias", "[-100, 100]"]),
        ({"logit_bias": '{"1": NaN}'}, ["logit_bias", "[-100, 100]"]),
        ({"logit_bias": '{"100": 1}'}, ["logit_bias", "[0, 99]", "got 100"]),
        ({"bad_words": "[]"}, ["bad_words", "1 to 64 strings"]),
        ({"bad_words": ""}, ["bad_words", "got ''"]),
        ({"n": 0}, ["n must", "[1, 16]", "got 0"]),
        ({"n": 17}, ["n must", "got 17"]),
        ({"json_object": 1}, ["json_object", "true or false"]),
        ({"json_schema": "{"}, ["json_schema", "JSON"]),
        ({"json_schema": "[]"}, ["json_schema", "JSON object, true or false", "got '[]'"]),
        ({"regex": ""}, ["regex", "not empty"]),
        ({"grammar": ""}, ["grammar", "not empty"]),
        ({"choice": "[]"}, ["choice", "JSON list", "got '[]'"]),
        ({"choice": '["a", ""]'}, ["choice", "not empty"]),
        ({"regex": "a", "grammar": "b"}, ["regex and grammar exclude each other"]),
        ({"json_object": True, "json_schema": "{}", "choice": '["a"]'}, ["json_object and json_schema and choice"]),
        ({"regex": "a", "ignore_eos": True}, ["regex and ignore_eos exclude each other"]),
        ({"logprobs": -1}, ["logprobs", "[0, 20]", "got -1"]),
        ({"logprobs": True}, ["logprobs", "got True"]),
        ({"prompt_logprobs": 21}, ["prompt_logprobs", "[0, 20]", "got 21"]),
        ({"echo": "true"}, ["echo", "got 'true'"]),
        ({"stream_interval_ms": -1}, ["stream_interval_ms", "[0, 10000]", "got -1"]),
        ({"priority_class": 10}, ["priority_class", "[0, 9]", "got 10"]),
        ({"tenant": ""}, ["tenant", "1 to 64", "got ''"]),
        ({"tenant": "a\nb"}, ["tenant", "printable"]),
        ({"tenant": "a" * 65}, ["tenant", "1 to 64"]),
        ({"queue_timeout_ms": 0}, ["queue_timeout_ms", "[1, 86400000]", "got 0"]),
        ({"timeout_ms": 86400001}, ["timeout_ms", "got 86400001"]),
        ({"cache_salt": ""}, ["cache_salt", "1 to 64"]),
        ({"speculate": None}, ["speculate", "got None"]),
        ({"truncate": "newest"}, ["truncate", "none or oldest", "got 'newest'"]),
        ({"add_generation_prompt": 1}, ["add_generation_prompt", "got 1"]),
        ({"temprature": 1}, ["unknown option 'temprature'", "temperature"]),
        ({"priority": 1}, ["unknown option 'priority'", "priority_class"]),
    ],
)
def test_a_bad_option_is_refused_with_field_value_and_rule(options, words):
    with pytest.raises(InvalidRequest) as refused:
        GenerateRequest.from_wire([1, 2, 3], options, LIMITS)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ["empty"]),
        (list(range(64)), ["max_model_len 64", "got 64"]),
        ([1, 100], ["[0, 99]", "got 100"]),
        ([-1], ["[0, 99]", "got -1"]),
    ],
)
def test_a_bad_prompt_is_refused_with_its_rule(prompt, words):
    with pytest.raises(InvalidRequest) as refused:
        GenerateRequest.from_wire(prompt, {}, LIMITS)
    for word in words:
        assert word in str(refused.value)


def test_defaults_are_those_of_the_contract_and_max_tokens_fits_what_is_left():
    asked = GenerateRequest.from_wire([1] * 60, {}, LIMITS)
    assert asked.max_tokens == 4
    assert asked.sampling.temperature == OPTIONS["temperature"].default == 0.0
    assert GenerateRequest.from_wire([1], {}, Limits(4096, 100)).max_tokens == OPTIONS["max_tokens"].default


def test_whole_numbers_are_floats_and_lists_of_stops_are_json():
    values = parse_options({"temperature": 1, "top_p": 1, "stop": '["a", "b"]'})
    assert (values["temperature"], values["top_p"], values["stop"]) == (1.0, 1.0, ("a", "b"))
    assert parse_options({"stop": "\n"})["stop"] == ("\n",)


def test_every_option_reaches_the_request_under_its_own_name():
    """Wrong if it failed: an option would be checked, and then lost on its way to the loop."""
    given = {
        "max_tokens": 9,
        "min_tokens": 3,
        "stop": "x",
        "stop_token_ids": "[5]",
        "include_stop_in_output": True,
        "ignore_eos": True,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 11,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": '{"4": -1.5}',
        "bad_words": "ab",
        "n": 2,
        "tools": "[]",
        "logprobs": 1,
        "prompt_logprobs": 2,
        "echo": True,
        "stream": True,
        "stream_interval_ms": 20,
        "priority_class": 0,
        "tenant": "t",
        "queue_timeout_ms": 30,
        "timeout_ms": 40,
        "cache_salt": "s",
        "speculate": False,
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    }
    parsed = {"stop": ("x",), "stop_token_ids": (5,), "logit_bias": ((4, -1.5),)}
    spelled = {"bad_words": ((97, 98), (32, 97, 98))}
    asked = GenerateRequest.from_wire([1], given, LIMITS, encode=lambda text: [ord(letter) for letter in text])
    for name, value in (given | parsed | spelled).items():
        held = {"priority_class": "priority"}.get(name, name)
        assert getattr(asked.sampling if hasattr(asked.sampling, held) else asked, held) == value, name
    tokenizers_own = {"chat", "messages", "add_generation_prompt", "truncate", "cancel"}
    assert set(given) | set(STRUCTURES) | tokenizers_own == set(OPTIONS)


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("json_object", True, True),
        ("json_schema", '{"type": "string"}', '{"type": "string"}'),
        ("regex", "a+", "a+"),
        ("grammar", 'start: "a"', 'start: "a"'),
        ("choice", '["a", "b"]', ("a", "b")),
    ],
)
def test_the_structure_that_is_asked_for_reaches_the_request(name, value, parsed):
    assert GenerateRequest.from_wire([1], {name: value}, LIMITS).structure == (name, parsed)
    assert GenerateRequest.from_wire([1], {}, LIMITS).structure is None


def test_bad_words_without_a_tokenizer_are_refused():
    with pytest.raises(InvalidRequest, match="bad_words"):
        GenerateRequest.from_wire([1], {"bad_words": "a"}, LIMITS)


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_takes_null_a_list_or_bytes(name):
    for value in (None, [], {}, b"x", ["a"]):
        with pytest.raises(InvalidRequest, match=f"{name} must be"):
            parse_options({name: value})


def test_tokens_span_prompt_and_output():
    request = Request(0, (1, 2, 3), 8, output_ids=[4, 5, 6])
    everything = [1, 2, 3, 4, 5, 6]
    for start in range(6):
        for stop in range(start + 1, 7):
            assert request.tokens(start, stop) == everything[start:stop]

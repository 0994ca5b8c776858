"""What a request may ask: every bad option is refused with its name, its value and its rule."""

import math

import pytest

from tritonforge.errors import InvalidRequest
from tritonforge.options import OPTIONS, parse_options
from tritonforge.request import GenerateRequest, Limits, Request

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
        ({"temprature": 1}, ["unknown option 'temprature'", "temperature"]),
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


def test_tokens_span_prompt_and_output():
    request = Request(0, (1, 2, 3), 8, output_ids=[4, 5, 6])
    everything = [1, 2, 3, 4, 5, 6]
    for start in range(6):
        for stop in range(start + 1, 7):
            assert request.tokens(start, stop) == everything[start:stop]

"""Every field of vLLM's SamplingParams and OpenAI's requests, as docs/options.md lists them, sent to the real server.

Wrong if it failed: somebody's request would be answered as if a field that it set were not there.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.options_docs import code, tables  # noqa: E402
from tritonforge.client import infer_request, stream  # noqa: E402
from tritonforge.errors import InvalidRequest  # noqa: E402

pytestmark = pytest.mark.server

FIELDS = {
    f"{heading}: {code(row['field'])}": (code(row["field"]), code(row["ours"]))
    for heading, rows in tables("field").items()
    for row in rows
}
MESSAGES = '[{"role": "user", "content": "What is the capital of France?"}]'

Check = Callable[[Any, Any], bool]
HONOURED: dict[str, tuple[dict[str, Any], Check]] = {
    "n": ({"n": 2}, lambda got, plain: got.output("index") == (0, 1)),
    "presence_penalty": ({"presence_penalty": 2.0}, lambda got, plain: got.token_ids != plain.token_ids),
    "frequency_penalty": ({"frequency_penalty": 2.0}, lambda got, plain: got.token_ids != plain.token_ids),
    "repetition_penalty": ({"repetition_penalty": 5.0}, lambda got, plain: len(set(got.token_ids)) == 24),
    "temperature": ({"temperature": 3.0}, lambda got, plain: got.token_ids != plain.token_ids),
    "top_p": ({"top_p": 1e-6, "temperature": 3.0}, lambda got, plain: got.token_ids == plain.token_ids),
    "top_k": ({"top_k": 1, "temperature": 3.0}, lambda got, plain: got.token_ids == plain.token_ids),
    "min_p": ({"min_p": 1.0, "temperature": 3.0}, lambda got, plain: got.token_ids == plain.token_ids),
    "seed": ({"seed": 1, "temperature": 3.0}, lambda got, plain: got.token_ids != plain.token_ids),
    "stop": ({"stop": "."}, lambda got, plain: got.text == " Paris"),
    "stop_token_ids": ({"stop_token_ids": "[30]"}, lambda got, plain: got.token_ids == plain.token_ids[:2]),
    "ignore_eos": ({"ignore_eos": True, "logit_bias": '{"2": 100}'}, lambda got, plain: got.finish_reason == "length"),
    "max_tokens": ({"max_tokens": 3}, lambda got, plain: got.token_ids == plain.token_ids[:3]),
    "min_tokens": ({"min_tokens": 9, "logit_bias": '{"2": 100}'}, lambda got, plain: len(got.token_ids) == 10),
    "logprobs": ({"logprobs": 1}, lambda got, plain: got.output("top_ids") == plain.token_ids),
    "prompt_logprobs": ({"prompt_logprobs": 1}, lambda got, plain: len(got.output("prompt_logprobs")) == 4),
    "logit_bias": ({"logit_bias": '{"28": 100}'}, lambda got, plain: set(got.token_ids) == {28}),
    "bad_words": ({"bad_words": "Paris"}, lambda got, plain: "Paris" in plain.text and "Paris" not in got.text),
    "regex": ({"regex": "[0-9]{3}"}, lambda got, plain: got.text.isdecimal() and len(got.text) == 3),
    "choice": ({"choice": '["Rome"]'}, lambda got, plain: got.text == "Rome"),
    "grammar": ({"grammar": 'root ::= "Oslo"'}, lambda got, plain: got.text == "Oslo"),
    "json_object": ({"json_object": True, "max_tokens": 2}, lambda got, plain: got.text.startswith("{")),
    "messages": ({"messages": MESSAGES, "text": ""}, lambda got, plain: got.statistics["prompt_tokens"] > 5),
    "stream": ({"stream": True}, lambda got, plain: len(got.chunks) > 1),
    "echo": ({"echo": True}, lambda got, plain: got.text.startswith("The capital of France is")),
}
"""Fields that are options of the same name: how one is sent, and what the answer is then, beside the plain one."""

REFUSED_HERE = {"tools": ({"tools": json.dumps([{"type": "function", "function": {"name": "f"}}]), "chat": True})}
"""Options that this model cannot honour."""


@pytest.fixture(scope="module")
def plain(ask):
    return ask(max_tokens=24)


def send(channel, name, value):
    """The answer of llm to a request with one more parameter, whatever its name is."""
    request = infer_request("llm", text="The capital of France is", max_tokens=2)
    request.parameters[name].string_param = value
    return list(stream(channel, request, 60))


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_is_honoured_or_refused_by_name(ask, channel, plain, field):
    name, ours = FIELDS[field]
    if name in HONOURED:
        options, honoured = HONOURED[name]
        assert ours == name and honoured(ask(**({"max_tokens": 24} | options)), plain)
    elif name in REFUSED_HERE:
        with pytest.raises(InvalidRequest, match=name):
            ask(**REFUSED_HERE[name])
    else:
        with pytest.raises(InvalidRequest, match=f"unknown option '{name}'"):
            send(channel, name, "1")


def test_openais_true_for_logprobs_is_refused_and_not_taken_for_a_number(ask):
    with pytest.raises(InvalidRequest, match=r"logprobs must be an integer .* got True"):
        ask(logprobs=True)


@pytest.mark.parametrize(
    ("name", "value"), [("timeout", 7), ("sequence_id", 9), ("sequence_start", True), ("sequence_end", True)]
)
def test_a_parameter_that_tritons_grpc_endpoint_takes_for_itself_is_refused_all_the_same(ask, name, value):
    """It reaches a model as a property of the request, not among its parameters."""
    with pytest.raises(InvalidRequest, match=f"unknown option '{name}'"):
        ask(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("chat", True), ("messages", MESSAGES), ("add_generation_prompt", False), ("truncate", "oldest")],
)
def test_the_decoder_alone_refuses_what_the_tokenizer_would_have_to_do(ask, name, value):
    """Token ids are a prompt already: nobody would render or truncate anything."""
    with pytest.raises(InvalidRequest, match=name):
        ask(model="decoder", input_ids=[504, 3575, 282], **{name: value})

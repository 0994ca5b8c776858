"""Options of what an answer must look like, and of how text becomes a prompt; and options over HTTP."""

import json
import re
import urllib.error
import urllib.request

import pytest
from jsonschema import Draft202012Validator

from tritonforge.errors import InvalidRequest

pytestmark = pytest.mark.server

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
QUESTION = "What is the capital of France?"
TURNS = [
    {"role": "user", "content": "hello " * 1800},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": QUESTION},
]

SHAPED = [
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"json_schema": json.dumps(PERSON)}, lambda text: Draft202012Validator(PERSON).is_valid(json.loads(text))),
    ({"regex": "[0-9]{3}-[a-z]{2,8}"}, lambda text: re.fullmatch("[0-9]{3}-[a-z]{2,8}", text)),
    ({"grammar": 'root ::= "<" [a-c]+ ">"\n'}, lambda text: re.fullmatch("<[a-c]+>", text)),
    ({"grammar": 'start: WORD "!"\nWORD: /[a-z]{4}/'}, lambda text: re.fullmatch("[a-z]{4}!", text)),
    ({"choice": ["Rome", "Oslo"]}, lambda text: text in ("Rome", "Oslo")),
]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("options", "matches"), SHAPED, ids=[next(iter(options)) for options, _ in SHAPED])
def test_a_structure_shapes_the_whole_answer(ask, options, matches, sampling):
    text = "Tell me about a person in Paris."
    assert not re.match("[{0-9<]|Rome|Oslo|[a-z]{4}!", ask(text, chat=True, **sampling).text)
    ends = {"logit_bias": '{"2": 8}', "max_tokens": 300}  # a small model is in no hurry to end
    answer = ask(text, chat=True, **sampling, **options, **ends)
    assert answer.finish_reason == "stop"
    assert matches(answer.text), answer.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"json_schema": '{"type": "integer", "minimum": 5, "maximum": 3}'}, ["json_schema cannot be followed"]),
        ({"regex": "(", "max_tokens": 3}, ["regex cannot be followed"]),
        ({"regex": "a", "choice": ["b"]}, ["regex and choice exclude each other"]),
        ({"json_object": True, "ignore_eos": True}, ["json_object and ignore_eos exclude each other"]),
    ],
)
def test_a_structure_that_cannot_be_followed_is_refused(ask, options, words):
    with pytest.raises(InvalidRequest) as refused:
        ask(**options)
    for word in words:
        assert word in str(refused.value)


# how text becomes a prompt


def test_chat_and_messages_render_the_models_template(ask):
    plain, chat = ask(QUESTION, echo=True), ask(QUESTION, echo=True, chat=True)
    messages = ask("", echo=True, messages=[{"role": "user", "content": QUESTION}])
    assert chat.output("prompt_token_ids") == messages.output("prompt_token_ids") != plain.output("prompt_token_ids")
    assert chat.token_ids == messages.token_ids != plain.token_ids
    system = ask("", echo=True, messages=[{"role": "system", "content": "Be brief."}, TURNS[-1]])
    assert "Be brief." in system.text


def test_add_generation_prompt_false_leaves_out_the_start_of_the_answer(ask):
    given = ask(QUESTION, chat=True, echo=True).output("prompt_token_ids")
    without = ask(QUESTION, chat=True, echo=True, add_generation_prompt=False).output("prompt_token_ids")
    assert given[: len(without)] == without and len(without) < len(given)


def test_truncate_oldest_cuts_the_start_and_says_how_much_and_none_refuses(ask):
    text = "".join(f"{number} " for number in range(3000))
    with pytest.raises(InvalidRequest, match="max_model_len 2048"):
        ask(text)
    cut = ask(text, truncate="oldest", echo=True, max_tokens=8)
    assert cut.statistics["prompt_tokens"] == 2040 and cut.statistics["truncated_tokens"] > 0
    assert text.endswith(cut.text[: -len(ask(text, truncate="oldest", max_tokens=8).text)])
    assert ask(truncate="oldest").statistics["truncated_tokens"] == 0


def test_truncate_oldest_drops_whole_turns_of_a_chat(ask):
    with pytest.raises(InvalidRequest, match="max_model_len 2048"):
        ask("", messages=TURNS, max_tokens=500)
    cut = ask("", messages=TURNS, truncate="oldest", max_tokens=500)
    short = ask("", messages=TURNS[2:], max_tokens=500)
    assert cut.token_ids == short.token_ids
    assert cut.statistics["truncated_tokens"] > 1800 and short.statistics["truncated_tokens"] == 0


def test_tools_are_refused_where_the_models_template_takes_none(ask):
    with pytest.raises(InvalidRequest, match="tools are not available"):
        ask(QUESTION, chat=True, tools=[TOOL])
    with pytest.raises(InvalidRequest, match="tools must come with chat or messages"):
        ask(QUESTION, tools=[TOOL])


# over HTTP


def post(server, **body):
    data = json.dumps({"text_input": "The capital of France is", "max_tokens": 12} | body).encode()
    request = urllib.request.Request(f"http://{server.http_url}/v2/models/llm/generate", data)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


@pytest.mark.parametrize(
    "options",
    [
        {"stop": '["States", "\\n\\n"]'},
        {"stop_token_ids": "[30]"},
        {"logit_bias": '{"28": 100}'},
        {"choice": '["Rome", "Oslo"]'},
        {"temperature": 1, "seed": 3, "top_k": 5},
        {"n": 2},
        {"logprobs": 2},
        {"priority_class": 0, "tenant": "a", "cache_salt": "b", "timeout_ms": 60000},
    ],
    ids=lambda options: next(iter(options)),
)
def test_http_generate_takes_the_options_that_grpc_takes(server, ask, options):
    over_http, over_grpc = post(server, **options), ask(**options)
    assert tuple(over_http["token_ids"]) == over_grpc.token_ids
    texts, reasons = over_grpc.output("text_output"), over_grpc.output("finish_reason")
    assert over_http["text_output"] == (list(texts) if "n" in options else texts[0])
    assert over_http["finish_reason"] == (list(reasons) if "n" in options else reasons[0])
    for name in ("index", "token_counts", "logprobs", "top_ids"):
        assert tuple(over_http.get(name, ())) == pytest.approx(over_grpc.output(name))


@pytest.mark.parametrize(
    "body",
    [{"stop": ["a"]}, {"logit_bias": {"28": 100}}, {"temperature": None}, {"priority_class": 10}, {"priority": 1}],
)
def test_http_generate_refuses_by_name_what_is_no_option_or_no_scalar(server, body):
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, **body)
    assert refused.value.code == 400
    assert next(iter(body)) in refused.value.read().decode()

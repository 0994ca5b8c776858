"""Whatever a client sends as options, token ids, text or grammar is accepted whole or refused in one short line.

Anything but InvalidRequest would be told to clients as a fault of the server, and a message without bound or with half
a surrogate pair could not be sent at all.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tritonforge.errors import InvalidRequest
from tritonforge.generate_request import GenerateRequest, Limits
from tritonforge.options import OPTIONS, STRUCTURES, parse_options
from tritonforge.prompt import build_prompt
from tritonforge.structured.constraints import Grammars
from tritonforge.structured.vocabulary import allowed_ids

LIMITS = Limits(max_model_len=64, vocab_size=100)
MESSAGE_BOUND = 1000
"""Characters: an error travels in headers of some transports, and into logs."""

FUZZ = settings(deadline=None, max_examples=300)

TEXT = st.text(st.characters(exclude_categories=()), max_size=40)
"""All code points: control characters and lone surrogates among them."""
LONG_TEXT = st.builds(lambda text, times: text * times, TEXT, st.integers(1, 400))
INTEGERS = st.integers() | st.sampled_from((2**31, 2**63, -(2**63) - 1, 10**400, 10**5000))
FLOATS = st.floats() | st.sampled_from((math.nan, math.inf, -math.inf, -0.0, 5e-324))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))
JSON_TEXT = VALUES.map(json.dumps) | st.builds(
    lambda parsed, place, inserted: json.dumps(parsed)[:place] + inserted, VALUES, st.integers(0, 60), TEXT
)
NESTED = st.builds(lambda part, depth: part * depth, st.sampled_from(("[", '{"a":', '[{"x":[')), st.integers(1, 20_000))

NAMES = ("role", "content", "system", "user", "assistant", "tool", "tool_calls", "type", "text", "function", "name")
NAMES += ("arguments", "parameters", "object", "properties", "required", "strict", "description", "id", "tool_call_id")
CHAT_VALUES = st.recursive(
    SCALARS | st.sampled_from(NAMES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | TEXT, inner, max_size=5),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("system", "user", "assistant", "tool"))},
        optional={"content": TEXT | CHAT_VALUES, "tool_calls": CHAT_VALUES, "name": CHAT_VALUES, "x": CHAT_VALUES},
    )
    | CHAT_VALUES,
    max_size=4,
).map(json.dumps)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": CHAT_VALUES | st.fixed_dictionaries({"name": TEXT}, optional={"parameters": CHAT_VALUES}),
        }
    )
    | CHAT_VALUES,
    max_size=3,
).map(json.dumps)

LIKELY: dict[str, st.SearchStrategy] = {
    "stop": st.lists(TEXT, max_size=18).map(json.dumps),
    "bad_words": st.lists(TEXT, max_size=4).map(json.dumps),
    "stop_token_ids": st.lists(st.integers(-2, 120), max_size=5).map(json.dumps),
    "logit_bias": st.dictionaries(st.integers(-2, 120).map(str) | TEXT, st.floats() | st.integers(-200, 200)).map(
        json.dumps
    ),
    "choice": st.lists(TEXT, max_size=4).map(json.dumps),
    "messages": MESSAGES,
    "tools": TOOLS,
    "truncate": st.sampled_from(("none", "oldest")),
}
"""Values that are often right, or wrong in one place only."""
BY_KIND: dict[type, st.SearchStrategy] = {
    bool: st.booleans(),
    int: st.integers(-2, 100),
    float: st.floats(-3, 101),
    str: TEXT,
}
ANY_VALUE = SCALARS | INTEGERS | FLOATS | LONG_TEXT | JSON_TEXT | NESTED | VALUES


def value_of(name: str) -> st.SearchStrategy:
    """Values for an option: mostly of its type, sometimes anything."""
    option = OPTIONS.get(name)
    if option is None:
        return ANY_VALUE
    likely = LIKELY.get(name, BY_KIND[option.kind])
    return likely | likely | BY_KIND[option.kind] | ANY_VALUE


@st.composite
def options(draw: st.DrawFn, max_size: int = 6) -> dict:
    """Options by name: known ones, mostly with likely values, and now and then an unknown one."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, max_size=max_size))
    if draw(st.integers(0, 9)) == 0:
        names.append(draw(LONG_TEXT))
    return {name: draw(value_of(name)) for name in names}


PROMPTS = st.lists(st.integers(0, 99), min_size=1, max_size=66) | st.lists(INTEGERS, max_size=70)


def accepted(call: Callable, *args, names=()) -> object | None:
    """The result of `call`, None when it refused: then the message must be bounded UTF-8 that holds one of `names`."""
    try:
        return call(*args)
    except InvalidRequest as error:
        message = str(error)
        assert len(message) < MESSAGE_BOUND, f"{len(message)} characters"
        message.encode()
        assert "\n" not in message and "\r" not in message
        assert any(name in message for name in names), f"{message!r} names none of {names}"
        return None


def encode(text: str) -> list[int]:
    return [ord(character) % 100 for character in text]


@FUZZ
@given(PROMPTS, options())
@example([1], {"\ud800": 1})
@example([1], {"x" * 5000: 1})
@example([1], {"temperature": 10**400})
@example([1], {"max_tokens": 10**5000})
@example([10**5000], {})
@example([1], {"logit_bias": '{"01": 1, "1": 2}'})
@example([1], {"logit_bias": '{"1": NaN}'})
@example([1], {"logit_bias": '{"1": 1e999}'})
@example([1], {"stop_token_ids": "[" + "9" * 5000 + "]"})
def test_a_request_is_valid_or_refused_by_the_name_of_what_is_wrong(prompt_ids, given_options):
    names = [*given_options, "unknown option", "input_ids", "prompt"]
    asked = accepted(lambda: GenerateRequest.from_wire(prompt_ids, given_options, LIMITS, encode=encode), names=names)
    if asked is not None:
        check_request(asked, prompt_ids, given_options)


def check_request(asked: GenerateRequest, prompt_ids: list[int], given_options: dict) -> None:
    """What code behind the door relies on."""
    assert list(asked.prompt_ids) == prompt_ids and all(0 <= token_id < 100 for token_id in prompt_ids)
    assert 1 <= asked.max_tokens <= LIMITS.max_model_len - len(prompt_ids)
    assert 0 <= asked.sampling.min_tokens <= asked.max_tokens
    assert 1 <= asked.n <= 16 and 0 <= asked.priority <= 9
    numbers = (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.min_p)
    assert all(type(number) is float and math.isfinite(number) for number in numbers)
    assert all(0 <= token_id < 100 for token_id in asked.stop_token_ids)
    assert all(0 <= token_id < 100 and -100 <= bias <= 100 for token_id, bias in asked.sampling.logit_bias)
    assert len(dict(asked.sampling.logit_bias)) == len(asked.sampling.logit_bias), "one of two biases would be ignored"
    assert all(word for word in asked.sampling.bad_words) and all(asked.stop)
    given_structures = [name for name in STRUCTURES if given_options.get(name) not in (None, False)]
    assert given_structures == ([] if asked.structure is None else [asked.structure[0]])
    for name in ("tenant", "cache_salt"):
        getattr(asked, name).encode()
    hash(asked)


@FUZZ
@given(ANY_VALUE, st.sampled_from(sorted(OPTIONS)))
def test_one_option_of_any_value_is_taken_as_it_is_or_refused_by_its_name(value, name):
    values = accepted(parse_options, {name: value}, names=[name])
    if values is not None:
        taken, kind = values["priority" if name == "priority_class" else name], OPTIONS[name].kind
        assert kind is str or taken == value
        assert type(value) is kind or (kind is float and type(value) is int)


class Letters:
    """Stands in for a tokenizer whose template writes all that it is given."""

    def encode(self, text: str) -> list[int]:
        return encode(text)

    def encode_end(self, text: str, room: int) -> list[int]:
        return encode(text[-room:])

    def encode_chat(self, chat, tools=None, *, add_generation_prompt=True) -> list[int]:
        text = "".join(message["role"] + (message["content"] or "") for message in chat)
        return encode(text + json.dumps([chat, tools], allow_nan=False, ensure_ascii=False).encode().decode())


PROMPT_OPTIONS = ("chat", "messages", "tools", "add_generation_prompt", "truncate", "max_tokens", "cancel")


@FUZZ
@given(TEXT.filter(lambda text: text.isprintable()) | st.just(""), st.data())
@example("", None)
def test_a_prompt_is_built_or_refused_by_the_name_of_what_is_wrong(text, data):
    names = data.draw(st.lists(st.sampled_from(PROMPT_OPTIONS), unique=True)) if data else []
    given_options = {name: data.draw(value_of(name)) for name in names}
    refusals = [*names, "text_input", "the prompt", "the last turn of the chat"]
    values = accepted(parse_options, given_options, names=refusals)
    if values is not None:
        prompt = accepted(build_prompt, Letters(), text, values, 64, names=refusals)
        if prompt is not None and values["truncate"] == "oldest":
            assert len(prompt.token_ids) <= 64 - (values["max_tokens"] or 1)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory):
    """Grammars over a byte-level tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_end|>", *alphabet]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:2]])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    file = tmp_path_factory.mktemp("grammars") / "tokenizer.json"
    tokenizer.save(str(file))
    compiled = Grammars(Path(file), len(tokens), [0, 1])
    yield compiled
    compiled.close()


REGEX_PARTS = (
    "a",
    "b",
    ".",
    "\\d",
    "\\w",
    "\\b",
    "\\",
    "(",
    ")",
    "(?:",
    "(?=",
    "(?i)",
    "(?P<a>",
    "[",
    "]",
    "[^",
    "a-z",
)
REGEX_PARTS += (
    "*",
    "+",
    "?",
    "{2,3}",
    "{0}",
    "{999999}",
    "|",
    "^",
    "$",
    "&",
    "~",
    "/",
    "\n",
    "é",
    "\\u{110000}",
    "\\x00",
)
GRAMMAR_PARTS = ("start", ":", "root", "::=", '"a"', "/b+/", "A", "x", "|", "(", ")", "*", "+", "?", "~", "{1,3}", "[")
GRAMMAR_PARTS += ("]", "\n", " ", "%json", "%ignore", "%import", "%regex", "{}", "<[*]>", "<[0-9]>", "<|im_end|>", "#")
GRAMMAR_PARTS += ('"', "/", "@x", "lazy", "=", "suffix", "max_tokens", "5", "//", "&", "..", "\\", '{"type":"object"}')
SCHEMA_KEYS = ("type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs")
SCHEMA_KEYS += (
    "minimum",
    "maximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minItems",
    "maxItems",
)
SCHEMA_KEYS += ("additionalProperties", "prefixItems", "patternProperties", "minProperties", "not", "x-guidance", "$id")
SCHEMA_WORDS = ("object", "array", "string", "integer", "number", "null", "date", "#", "#/$defs/a", "a", "^a+$", "(")
SCHEMAS = st.recursive(
    SCALARS | st.sampled_from(SCHEMA_WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(SCHEMA_KEYS) | TEXT, inner, max_size=5),
)


def joined(parts: tuple[str, ...]) -> st.SearchStrategy:
    return st.lists(st.sampled_from(parts) | st.sampled_from(parts) | TEXT, max_size=25).map("".join)


SOURCES = {
    "regex": joined(REGEX_PARTS) | TEXT | LONG_TEXT,
    "grammar": joined(GRAMMAR_PARTS)
    | joined(GRAMMAR_PARTS).map("start: {}".format)
    | joined(GRAMMAR_PARTS).map("root ::= {}".format)
    | LONG_TEXT,
    "json_schema": st.dictionaries(st.sampled_from(SCHEMA_KEYS), SCHEMAS, max_size=6).map(json.dumps),
    "choice": st.lists(TEXT, max_size=5).map(json.dumps),
}


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_a_structure_compiles_to_a_mask_or_is_refused_by_its_name(grammars, data):
    kind = data.draw(st.sampled_from(sorted(SOURCES)))
    values = accepted(parse_options, {kind: data.draw(SOURCES[kind])}, names=[kind])
    if values is None:
        return
    grammar = accepted(grammars.compile, kind, values[kind], names=[kind])
    if grammar is not None:
        state = grammar.start()
        assert state.mask().any()
        for _ in range(data.draw(st.integers(0, 8))):
            if state.finished:
                break
            accepted(state.accept, data.draw(st.sampled_from([int(i) for i in allowed_ids(state.mask()) if i > 1])))
            if accepted(state.mask, names=["grammar"]) is None:
                break

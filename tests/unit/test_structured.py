"""Structured output: an answer that ends must be what was asked for; what can never be followed is refused at once."""

import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator, FormatChecker
from llguidance import LLParserLimits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tritonforge.errors import EngineFailure, InvalidRequest
from tritonforge.options import STRUCTURES
from tritonforge.structured import constraints as structured
from tritonforge.structured.constraints import Grammar, Grammars
from tritonforge.structured.grammar_source import MAX_LENGTH
from tritonforge.structured.vocabulary import allowed_ids, apply_mask, token_mask

SCHEMAS = sorted((Path(__file__).parent / "schemas").glob("*.json"))
WORDS = ("true", "false", "null", '": "', '", "', '"}', "]}", "yes", "no", "an", "and", " a", "12", "é", "😀")
END = 2


def byte_level_tokenizer() -> Tokenizer:
    """Three special tokens (two of them end tokens), the 256 bytes, and a few words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [spell.pre_tokenize_str(word)[0][0] for word in WORDS]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, *(word for word in words if len(word) > 1)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    tokenizer.pre_tokenizer, tokenizer.decoder = spell, decoders.ByteLevel()
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Bytes as <0x..> pieces, spaces as U+2581."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *map(chr, range(33, 127)),
        "▁",
        "▁yes",
    ]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


class Fixture:
    """A tokenizer with its grammars, and random answers over their masks."""

    def __init__(self, tokenizer: Tokenizer, file: Path, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.grammars = Grammars(file, vocab_size, [0, END])
        self.ends = np.array([0, END])
        texts = [tokenizer.decode([token_id]) for token_id in range(tokenizer.get_vocab_size())]
        self.closing = np.array([bool(text) and set(text) <= set('"}],: ') for text in texts])

    def compile(self, kind: str, value: object) -> Grammar:
        return self.grammars.compile(kind, value)

    def walk(self, grammar: Grammar, seed: int, max_tokens: int = 300) -> str | None:
        """A random answer that ended, or None. Prefers tokens that bring an end nearer."""
        state, draw, answer = grammar.start(), random.Random(seed), []
        while len(answer) < max_tokens:
            allowed = allowed_ids(state.mask())
            may_end = np.isin(self.ends, allowed).all()
            assert may_end == np.isin(self.ends, allowed).any()  # all end tokens mean the same
            if may_end and (state.finished or draw.random() < 0.3):
                return self.tokenizer.decode(answer)
            allowed = np.setdiff1d(allowed, self.ends)
            closing = allowed[self.closing[allowed]]
            answer.append(int(draw.choice(closing if len(closing) and draw.random() < 0.7 else allowed)))
            state.accept(answer[-1])
        return None

    def follows(self, grammar: Grammar, text: str) -> str:
        """'no' when `text` cannot begin an answer, 'begins' when it can, 'ends' when it may stand as one."""
        state = grammar.start()
        for token_id in self.tokenizer.encode(text, add_special_tokens=False).ids:
            if token_id not in allowed_ids(state.mask()):
                return "no"
            state.accept(token_id)
        return "ends" if END in allowed_ids(state.mask()) else "begins"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fixture]:
    file = tmp_path_factory.mktemp("small") / "tokenizer.json"
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(file))
    fixture = Fixture(tokenizer, file, vocab_size=320)
    yield fixture
    fixture.grammars.close()


@pytest.fixture(scope="module")
def real(release_dir: Path) -> Iterator[Fixture]:
    folder = release_dir / "model_repository" / "decoder" / "1"
    config = json.loads((folder / "decoder.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    fixture = Fixture(tokenizer, folder / "tokenizer.json", config["engine_config"]["vocab_size"])
    yield fixture
    fixture.grammars.close()


def check_schema_walks(fixture: Fixture, schema: str, walks: int) -> None:
    judge = Draft202012Validator(json.loads(schema), format_checker=FormatChecker())
    grammar = fixture.compile("json_schema", schema)
    answers = [answer for seed in range(walks) if (answer := fixture.walk(grammar, seed)) is not None]
    assert len(answers) >= walks // 2
    for answer in answers:
        judge.validate(json.loads(answer))


@pytest.mark.parametrize("file", SCHEMAS, ids=lambda file: file.stem)
def test_every_finished_answer_to_a_json_schema_validates(small: Fixture, file: Path) -> None:
    check_schema_walks(small, file.read_text(), walks=6)


@pytest.mark.server
@pytest.mark.parametrize("file", SCHEMAS, ids=lambda file: file.stem)
def test_every_finished_answer_validates_with_the_vocabulary_of_the_release(real: Fixture, file: Path) -> None:
    check_schema_walks(real, file.read_text(), walks=8)


def test_there_are_twenty_schemas() -> None:
    assert len(SCHEMAS) == 20


def test_json_mode_gives_an_object_of_anything(small: Fixture) -> None:
    grammar = small.compile("json_object", True)
    answers = [answer for seed in range(20) if (answer := small.walk(grammar, seed)) is not None]
    assert len(answers) > 10
    assert all(isinstance(json.loads(answer), dict) for answer in answers)
    assert small.follows(grammar, '{"a": [1, 2.5e3, null, {"b": true}]}') == "ends"
    assert small.follows(grammar, "[1]") == "no"


@pytest.mark.parametrize(
    "regex", [r"[a-c]{2,5}", r"(yes|no)!?", r"\d{4}-\d\d-\d\d", r"^a+b*$", r"[^x]y", r'"[é😀]"', "a/b\n"]
)
def test_every_answer_matches_its_regex_from_end_to_end(small: Fixture, regex: str) -> None:
    grammar = small.compile("regex", regex)
    answers = [answer for seed in range(20) if (answer := small.walk(grammar, seed, max_tokens=40)) is not None]
    assert answers
    assert all(re.fullmatch(regex, answer) for answer in answers)


def test_each_choice_can_be_answered_and_nothing_else(small: Fixture) -> None:
    choices = ("an", "and", "no", 'a "quoted" \\ word', "é😀\n", "\x01")
    grammar = small.compile("choice", choices)
    assert all(small.follows(grammar, choice) == "ends" for choice in choices)
    assert small.follows(grammar, "anx") == "no"
    assert {"an", "no"} <= {small.walk(grammar, seed) for seed in range(60)} <= set(choices)


LARK = 'start: sum\nsum: NUMBER | sum "+" NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/'
GBNF = 'root ::= sum # a sum\nsum ::= number ("+" number)* | "(" sum ")"\nnumber ::= [0-9]{1,3}'


@pytest.mark.parametrize("grammar", [LARK, GBNF], ids=["lark", "gbnf"])
def test_a_grammar_is_lark_or_gbnf(small: Fixture, grammar: str) -> None:
    compiled = small.compile("grammar", grammar)
    assert small.follows(compiled, "1+23") == "ends"
    assert small.follows(compiled, "(4+5)") == "ends"
    assert small.follows(compiled, "(4+5") == "begins"
    assert small.follows(compiled, "4+a") == "no"


def test_an_end_token_is_allowed_exactly_when_the_answer_may_end(small: Fixture) -> None:
    grammar = small.compile("regex", "ab?|abcd")
    assert [small.follows(grammar, text) for text in ("", "a", "ab", "abc", "abcd")] == [
        "begins",
        "ends",
        "ends",
        "begins",
        "ends",
    ]


def test_an_answer_is_finished_when_only_the_end_may_follow(small: Fixture) -> None:
    state = small.compile("regex", "ab?").start()
    assert not state.finished
    state.accept(small.tokenizer.token_to_id("a"))
    assert not state.finished
    state.accept(small.tokenizer.token_to_id("b"))
    assert state.finished
    assert list(allowed_ids(state.mask())) == [0, END]
    state.accept(END)
    assert state.finished


def test_answers_of_one_grammar_do_not_disturb_each_other(small: Fixture) -> None:
    grammar = small.compile("json_schema", SCHEMAS[0].read_text())
    alone = [small.walk(grammar, seed) for seed in range(8)]
    together: list[str | None] = [None] * 8

    def walk(seed: int) -> None:
        together[seed] = small.walk(grammar, seed)

    threads = [threading.Thread(target=walk, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_answers_go_on_when_their_grammar_is_built_anew(small: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "MAX_ANSWERS", 2)
    grammar = small.compile("regex", "(ab){1,9}c")
    states = [grammar.start() for _ in range(5)]
    for state in states:
        state.accept(small.tokenizer.token_to_id("a"))
    assert all(list(allowed_ids(state.mask())) == [small.tokenizer.token_to_id("b")] for state in states)


def test_a_grammar_is_compiled_once_while_it_is_used(small: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    first = small.compile("regex", "once")
    assert small.compile("choice", ("once",)) is not first
    assert small.compile("regex", "once") is first
    monkeypatch.setattr(structured, "MAX_COMPILED", 2)
    second = small.compile("regex", "twice")
    assert small.compile("regex", "once") is first
    small.compile("regex", "thrice")
    assert small.compile("regex", "once") is first
    assert small.compile("regex", "twice") is not second  # the one not used for longest had to go


def test_a_token_that_was_not_allowed_is_an_error_of_the_engine(small: Fixture) -> None:
    state = small.compile("regex", "ab").start()
    state.accept(small.tokenizer.token_to_id("b"))
    for _ in range(2):
        with pytest.raises(EngineFailure, match="not allowed"):
            state.mask()
    with pytest.raises(EngineFailure):
        _ = state.finished


def test_padding_of_the_logits_is_never_allowed(small: Fixture) -> None:
    mask = small.compile("grammar", "start: <[*]>").start().mask()
    assert len(mask) == 10
    assert max(allowed_ids(mask)) == small.tokenizer.get_vocab_size() - 1


def test_logits_of_forbidden_tokens_become_minus_infinity() -> None:
    logits = np.arange(40, dtype=np.float32)
    apply_mask(logits, token_mask([0, 31, 39], 2))
    assert list(np.flatnonzero(np.isfinite(logits))) == [0, 31, 39]
    assert logits[39] == 39


def test_a_tokenizer_of_byte_fallback_pieces_works_too(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path / "tokenizer.json", tokenizer.get_vocab_size(), [END])
    state = grammars.compile("choice", ("é yes",)).start()
    tokens = []
    while not state.finished:
        tokens.append(int(allowed_ids(state.mask())[-1]))
        state.accept(tokens[-1])
    assert tokenizer.decode(tokens) == "é yes"
    assert tokenizer.token_to_id("▁") in tokens
    grammars.close()


def test_a_model_whose_tokenizer_cannot_be_read_refuses_structure_and_says_why(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidRequest, match=r"regex is not available with this model: .*decoder"):
        Grammars(tmp_path / "tokenizer.json", 2, [1]).compile("regex", "a")


def test_a_model_without_end_token_refuses_structure(tmp_path: Path) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidRequest, match="no end token"):
        Grammars(tmp_path / "tokenizer.json", 320, []).compile("regex", "a")


def required(name: str, part: object) -> dict[str, object]:
    return {"type": "object", "properties": {name: part}, "required": [name], "additionalProperties": False}


IMPOSSIBLE = {
    "false": False,
    "empty enum": {"enum": []},
    "integer bounds": {"type": "integer", "minimum": 3, "maximum": 2},
    "number bounds": {"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 3},
    "no integer between": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4},
    "no multiple between": {"type": "integer", "minimum": 3, "maximum": 4, "multipleOf": 5},
    "length bounds": {"type": "string", "minLength": 3, "maxLength": 2},
    "pattern longer than maxLength": {"type": "string", "pattern": "^aaaa$", "maxLength": 2},
    "pattern against enum": {"type": "string", "pattern": "^a+$", "enum": ["b"]},
    "item bounds": {"type": "array", "minItems": 3, "maxItems": 2},
    "items that cannot be": {"type": "array", "items": False, "minItems": 1},
    "no type": {"type": []},
    "enum against type": {"type": "integer", "enum": ["a"]},
    "two types": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "required property that cannot be": required("a", False),
    "required property that may not be": {"type": "object", "required": ["b"], "additionalProperties": False},
    "property bounds": {"type": "object", "minProperties": 1, "maxProperties": 0},
    "anyOf of nothing": {"anyOf": [{"enum": []}, False]},
    "refers to itself": {"$ref": "#"},
    "refers in a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "requires itself": required("a", {"$ref": "#"}),
    "requires itself in every case": {
        "$defs": {
            "x": {"anyOf": [required("a", {"$ref": "#/$defs/x"}), {"type": "array", "minItems": 1, "items": False}]}
        },
        "$ref": "#/$defs/x",
    },
    "items of itself": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
}


@pytest.mark.parametrize("schema", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_schema_that_nothing_can_match_is_refused(small: Fixture, schema: object) -> None:
    with pytest.raises(InvalidRequest, match=r"json_schema cannot be followed: .+"):
        small.compile("json_schema", json.dumps(schema))


def test_a_schema_that_contains_itself_where_it_need_not_is_fine(small: Fixture) -> None:
    schema = required("next", {"anyOf": [{"type": "null"}, {"$ref": "#"}]})
    assert small.follows(small.compile("json_schema", json.dumps(schema)), '{"next": {"next": null}}') == "ends"


UNSUPPORTED = {
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "format": {"type": "string", "format": "colour"},
    "look-?around": {"type": "string", "pattern": "^(?=a)b$"},
    "example.com": {"$ref": "https://example.com/schema.json"},
    "does not exist": {"$ref": "#/$defs/missing"},
    "x-guidance": {"x-guidance": {"lenient": True}, "type": "string", "format": "colour"},
    "minProperties": {"type": "object", "additionalProperties": True, "minProperties": 2},
    "multipleOf": {"anyOf": [{"type": "integer", "multipleOf": 101}, {"type": "integer", "multipleOf": 103}]},
    "minLength": {"type": "string", "minLength": "x"},
    "type": {"type": "text"},
}


@pytest.mark.parametrize(("name", "schema"), UNSUPPORTED.items(), ids=UNSUPPORTED)
def test_what_a_schema_may_not_ask_is_refused_by_name(small: Fixture, name: str, schema: object) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s)json_schema cannot be followed: .*{name}"):
        small.compile("json_schema", json.dumps(schema))


MALFORMED: dict[str, tuple[str, object]] = {
    "open group": ("regex", "("),
    "backreference": ("regex", r"(a)\1"),
    "lookahead": ("regex", "(?=a)b"),
    "lone backslash": ("regex", "a\\"),
    "class of nothing": ("regex", r"a[^\s\S]b"),
    "text after the end": ("regex", "a$b"),
    "lark syntax": ("grammar", "start: ((("),
    "no start": ("grammar", 'begin: "a"'),
    "unknown rule": ("grammar", "start: missing"),
    "rule of itself": ("grammar", "start: start"),
    "terminals that exclude each other": ("grammar", "start: A\nA: /a/ & /b/"),
    "unknown special token": ("grammar", "start: <|nothing|>"),
    "attribute without effect": ("grammar", "start[temperature=0.5]: /a+/"),
    "lenient schema inside": ("grammar", 'start: %json {"x-guidance": {"lenient": true}, "format": "colour"}'),
    "gbnf syntax": ("grammar", "root ::= ((("),
    "gbnf without root": ("grammar", 'top ::= "a"'),
    "gbnf unknown rule": ("grammar", "root ::= missing"),
    "json": ("grammar", '{"grammars": []}'),
    "half of a surrogate pair": ("json_schema", '{"const": "\\ud800"}'),
    "not a number": ("json_schema", '{"type": "string", "minLength": NaN}'),
    "number without end": ("json_schema", '{"type": "number", "multipleOf": 1e999}'),
    "list": ("json_schema", "[]"),
    "no json": ("json_schema", "{"),
}


@pytest.mark.parametrize(("kind", "value"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_structure_is_refused_in_one_line_that_names_it(small: Fixture, kind: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=rf"{kind} cannot be followed: .+") as refusal:
        small.compile(kind, value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def deep(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def patterns(count: int) -> str:
    return json.dumps(
        {"type": "string", "allOf": [{"pattern": f"{letter}.{{12}}z"} for letter in "abcdefghijkl"[:count]]}
    )


HOSTILE: dict[str, tuple[str, str]] = {
    "repetition of repetition": ("regex", "(a{1000}){1000}"),
    "repetition thrice": ("regex", "((a{1000}){1000}){1000}"),
    "a billion": ("regex", "a{1000000000}"),
    "ambiguous optionals": ("regex", "(a?){5000}a{5000}"),
    "groups in groups": ("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "too long": ("regex", "a" * (MAX_LENGTH + 1)),
    "schema in schema": ("json_schema", deep(200)),
    "schema in schema beyond the parser": ("json_schema", deep(2_000)),
    "large prime multiple": ("json_schema", '{"type": "integer", "multipleOf": 1000003}'),
    "patterns to intersect": ("json_schema", patterns(12)),
    "many values": ("json_schema", json.dumps({"enum": ["x" * 40 + str(number) for number in range(2_000)]})),
    "product of choices": (
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [required(f"p{i}{j}", {}) for j in range(8)]} for i in range(8)]}),
    ),
    "rules that double": (
        "grammar",
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "a"',
    ),
    "terminals that double": (
        "grammar",
        "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "a"',
    ),
    "terminal of itself": ("grammar", 'start: A\nA: "a" A | "b"'),
    "complement of an explosion": ("grammar", "start: A\nA: ~/(a|b)*a(a|b){30}/ & /(a|b)*a(a|b){30}/"),
    "answer without an end": ("grammar", 'start: "a" start'),
    "terminal without an end": ("grammar", "start: /b+/ /b+/"),
    "terminal without an end, later": ("grammar", 'start: "a" B B\nB: /b+/'),
    "terminal without an end in gbnf": ("grammar", 'root ::= "b" x x\nx ::= [b]+'),
    "terminal without an end and an option": ("grammar", '%llguidance {"no_forcing": false}\nstart: /b+/ "b"'),
    "parentheses": ("grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "gbnf parentheses": ("grammar", "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
}


@pytest.mark.parametrize(("kind", "value"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_structure_is_refused_or_can_be_followed(small: Fixture, kind: str, value: str) -> None:
    try:
        grammar = small.compile(kind, value)
    except InvalidRequest as refusal:
        assert kind in str(refusal)
        return
    state = grammar.start()
    state.accept(int(np.setdiff1d(allowed_ids(state.mask()), small.ends)[0]))
    assert state.mask().any()


def test_a_grammar_that_becomes_too_complex_fails_its_own_answer_only(
    small: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "LIMITS", LLParserLimits(step_max_items=400, verbose_errors=False))
    grammar = small.compile("grammar", 'start: "no" | "y" e\ne: e e e e | e e e | e e | "a" | "b" | "" | e "+" e')
    states = {first: grammar.start() for first in "yn"}
    for first, state in states.items():
        state.accept(small.tokenizer.token_to_id(first))
    with pytest.raises(InvalidRequest, match=r"the answer cannot go on in its grammar: .*items"):
        for _ in range(100):
            states["y"].mask()
            states["y"].accept(small.tokenizer.token_to_id("a"))
    states["n"].accept(small.tokenizer.token_to_id("o"))
    assert states["n"].finished
    assert small.follows(grammar, "no") == "ends"


@pytest.mark.parametrize("kind", STRUCTURES)
def test_every_structure_option_can_be_compiled(small: Fixture, kind: str) -> None:
    values: dict[str, object] = {
        "json_object": True,
        "json_schema": "true",
        "regex": "a",
        "grammar": 'start: "a"',
        "choice": ("a",),
    }
    assert isinstance(small.compile(kind, values[kind]), Grammar)


def test_a_closed_worker_computes_no_more_masks(tmp_path: Path) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path / "tokenizer.json", 320, [END])
    state = grammars.compile("regex", "ab").start()
    grammars.close()
    with pytest.raises(RuntimeError):
        state.accept(3)

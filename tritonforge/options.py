"""The generation options: one table that the models check requests against, and that the docs and error texts repeat.

Options travel as Triton request parameters, which are scalars: a list, an object or a chat travels as a JSON string. An
ensemble hands all options to all its models, so each model checks all of them and uses its own. Every value is checked,
none is ignored, none is clamped.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tritonforge.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20
MAX_SAMPLES = 16
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_TIMEOUT_MS = 24 * 3600 * 1000
PRIORITIES = 10
"""Priority classes, 0 the most urgent."""
DEFAULT_PRIORITY = 5

Read = Callable[[Any], Any]
"""From a value of the right wire type to the option's value. Raises ValueError when it breaks the option's rule."""


@dataclass(frozen=True)
class Option:
    """A generation option: `kind` is the wire type, `default` what an absent option means (None: decided later)."""

    name: str
    kind: type
    default: Any
    rule: str
    read: Read = lambda value: value


def _within(low: float, high: float, *, open_low: bool = False) -> Read:
    def read(value: float) -> float:
        if not (low < value <= high if open_low else low <= value <= high):
            raise ValueError
        return value

    return read


def parse_json(value: str) -> Any:
    """The JSON in `value`. Raises ValueError when it is none, is nested too deeply, or holds no UTF-8 or no number."""
    try:
        parsed = json.loads(value)
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()  # nor NaN, 1e999, or half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no valid JSON: {str(error)[:80] or type(error).__name__}") from None
    return parsed


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _strings(most: int, longest: int) -> Read:
    """A plain string is a list of one; text that starts with [ is a JSON list."""

    def read(value: str) -> tuple[str, ...]:
        strings = parse_json(value) if value.startswith("[") else [value]
        _require(1 <= len(strings) <= most and all(isinstance(text, str) for text in strings))
        _require(all(1 <= len(text) <= longest for text in strings))
        return tuple(strings)

    return read


def _token_ids(value: str) -> tuple[int, ...]:
    token_ids = parse_json(value)
    _require(isinstance(token_ids, list) and 1 <= len(token_ids) <= MAX_BIASES and all(map(_is_token_id, token_ids)))
    return tuple(token_ids)


def _biases(value: str) -> tuple[tuple[int, float], ...]:
    biases = parse_json(value)
    _require(isinstance(biases, dict) and 1 <= len(biases) <= MAX_BIASES)
    _require(all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in biases.values()))
    _require(all(token_id.isdecimal() and _is_token_id(int(token_id)) for token_id in biases))
    return tuple((int(token_id), float(bias)) for token_id, bias in biases.items())


def _json_schema(value: str) -> str:
    _require(isinstance(parse_json(value), dict | bool))
    return value


def _choices(value: str) -> tuple[str, ...]:
    choices = parse_json(value)
    _require(isinstance(choices, list) and choices and all(isinstance(text, str) and text for text in choices))
    return tuple(choices)


def _not_empty(value: str) -> str:
    _require(bool(value))
    return value


def _name(value: str) -> str:
    _require(1 <= len(value) <= 64 and value.isprintable())
    return value


def _one_of(*names: str) -> Read:
    def read(value: str) -> str:
        _require(value in names)
        return value

    return read


_BOOL = "must be true or false"
_PENALTY = "must be a number in [-2, 2]; 0 is none"
_TIMEOUT = f"must be an integer in [1, {MAX_TIMEOUT_MS}] milliseconds"
_top_logprobs = _within(0, MAX_TOP_LOGPROBS)
_timeout = _within(1, MAX_TIMEOUT_MS)

OPTIONS = {
    option.name: option
    for option in (
        # how long
        Option("max_tokens", int, 128, "must be an integer in [1, max_model_len - prompt_tokens]", _within(1, 2**31)),
        Option("min_tokens", int, 0, "must be an integer in [0, max_tokens]", _within(0, 2**31)),
        Option(
            "stop",
            str,
            (),
            f"must be a string, or a JSON list of 1 to {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_LENGTH} "
            "characters",
            _strings(MAX_STOP_STRINGS, MAX_STOP_LENGTH),
        ),
        Option("stop_token_ids", str, (), f"must be a JSON list of 1 to {MAX_BIASES} token ids", _token_ids),
        Option("include_stop_in_output", bool, False, _BOOL),
        Option("ignore_eos", bool, False, _BOOL),
        # how a token is drawn
        Option("temperature", float, 0.0, "must be a finite number in [0, 100]; 0 is greedy", _within(0, 100)),
        Option("top_k", int, 0, "must be an integer in [0, vocab_size]; 0 keeps all tokens", _within(0, 2**31)),
        Option("top_p", float, 1.0, "must be a number in (0, 1]", _within(0, 1, open_low=True)),
        Option("min_p", float, 0.0, "must be a number in [0, 1]; 0 keeps all tokens", _within(0, 1)),
        Option("seed", int, None, "must be an integer in [0, 2**63 - 1]", _within(0, 2**63 - 1)),
        Option(
            "repetition_penalty",
            float,
            1.0,
            "must be a number in (0, 10]; 1 is none",
            _within(0, 10, open_low=True),
        ),
        Option("presence_penalty", float, 0.0, _PENALTY, _within(-2, 2)),
        Option("frequency_penalty", float, 0.0, _PENALTY, _within(-2, 2)),
        Option(
            "logit_bias",
            str,
            (),
            f"must be a JSON object of 1 to {MAX_BIASES} token ids, each with a number in [-100, 100]",
            _biases,
        ),
        Option(
            "bad_words",
            str,
            (),
            f"must be a string, or a JSON list of 1 to {MAX_BAD_WORDS} strings, each of 1 to {MAX_STOP_LENGTH} "
            "characters",
            _strings(MAX_BAD_WORDS, MAX_STOP_LENGTH),
        ),
        Option("n", int, 1, f"must be an integer in [1, {MAX_SAMPLES}]", _within(1, MAX_SAMPLES)),
        # what the answer must look like
        Option("json_object", bool, False, _BOOL),
        Option("json_schema", str, None, "must be a JSON schema: a JSON object, true or false", _json_schema),
        Option("regex", str, None, "must be a regular expression that is not empty", _not_empty),
        Option("grammar", str, None, "must be a grammar that is not empty", _not_empty),
        Option("choice", str, None, "must be a JSON list of strings that are not empty", _choices),
        # what is told
        Option("logprobs", int, None, f"must be an integer in [0, {MAX_TOP_LOGPROBS}]", _top_logprobs),
        Option("prompt_logprobs", int, None, f"must be an integer in [0, {MAX_TOP_LOGPROBS}]", _top_logprobs),
        Option("echo", bool, False, _BOOL),
        Option("stream", bool, False, _BOOL),
        Option("stream_interval_ms", int, None, "must be an integer in [0, 10000]; 0 sends at once", _within(0, 10000)),
        # when it is served
        Option(
            "priority_class",  # Triton's gRPC endpoint takes a parameter called `priority` for itself, and drops it
            int,
            DEFAULT_PRIORITY,
            f"must be an integer in [0, {PRIORITIES - 1}]; 0 is the most urgent",
            _within(0, PRIORITIES - 1),
        ),
        Option("tenant", str, "", "must be a string of 1 to 64 printable characters", _name),
        Option("queue_timeout_ms", int, None, _TIMEOUT, _timeout),
        Option("timeout_ms", int, None, _TIMEOUT, _timeout),
        Option("cache_salt", str, "", "must be a string of 1 to 64 printable characters", _name),
        Option("speculate", bool, True, _BOOL),
        # how text becomes a prompt
        Option("chat", bool, False, "must be true or false; true renders text_input as one user message"),
        Option("messages", str, None, 'must be a JSON list of {"role", "content"} objects, with an empty text_input'),
        Option("tools", str, None, "must be a JSON list of tools, with chat or messages"),
        Option("add_generation_prompt", bool, True, _BOOL),
        Option("truncate", str, "none", "must be none or oldest", _one_of("none", "oldest")),
        Option("cancel", str, None, "must be the id of a request, sent alone to the decoder", _not_empty),
    )
}

PROMPT_OPTIONS = ("chat", "messages", "add_generation_prompt", "truncate")
"""What the tokenizer does, and nobody for a prompt of token ids."""

STRUCTURES = ("json_object", "json_schema", "regex", "grammar", "choice")
"""At most one of these may be given."""


def parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option with its checked value, defaults filled in; max_tokens stays None when absent.

    Raises InvalidRequest for an unknown name, a wrong type, a value outside its rule, or two that exclude each other.
    """
    for name in options:
        if name not in OPTIONS:
            raise InvalidRequest(f"unknown option {name!r}; known options: {', '.join(sorted(OPTIONS))}")
    values = {name: option.default for name, option in OPTIONS.items()} | {"max_tokens": None}
    for name, value in options.items():
        values[name] = _checked(OPTIONS[name], value)
    values["priority"] = values.pop("priority_class")
    structures = [name for name in STRUCTURES if values[name] not in (None, False)]
    if len(structures) > 1:
        raise InvalidRequest(f"{' and '.join(structures)} exclude each other: give one of them")
    if structures and values["ignore_eos"]:
        raise InvalidRequest(
            f"{structures[0]} and ignore_eos exclude each other: a structure says where the answer ends"
        )
    return values


def refuse_prompt_options(options: Mapping[str, Any]) -> None:
    """Raise InvalidRequest when a request that comes with token ids asks for what makes a prompt of text."""
    for name in PROMPT_OPTIONS:
        if name in options:
            raise InvalidRequest(f"{name} must go with text_input: a prompt of token ids is rendered and cut already")


def given_structure(values: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The one of STRUCTURES that was given, with its value."""
    return next(((name, values[name]) for name in STRUCTURES if values[name] not in (None, False)), None)


def _checked(option: Option, value: Any) -> Any:
    typed = _typed(option.kind, value)
    if typed is None:
        raise InvalidRequest(f"{option.name} {option.rule}, got {_shown(value)}")
    try:
        return option.read(typed)
    except ValueError as error:
        why = f": {error}" if str(error) else ""
        raise InvalidRequest(f"{option.name} {option.rule}, got {_shown(value)}{why}") from None


def _typed(kind: type, value: Any) -> Any:
    """`value` as `kind`, or None: a whole number is a float too, true is no number, "1" is no number, text is UTF-8."""
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        return None
    return None if kind is str and not _is_utf8(value) else value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

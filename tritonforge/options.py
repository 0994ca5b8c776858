"""The generation options: one table that the models check requests against, and that the docs and error texts repeat.

Options travel as Triton request parameters, which are scalars: a list, an object or a chat travels as a JSON string. An
ensemble hands all options to all its models, so each model checks all of them and uses its own. Every value is checked,
none is ignored, none is clamped.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritonforge import option_values as read
from tritonforge.errors import InvalidRequest
from tritonforge.option_values import MAX_NAME_LENGTH, Read

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20
MAX_SAMPLES = 16
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 64
MAX_TIMEOUT_MS = 24 * 3600 * 1000
PRIORITIES = 10
"""Priority classes, 0 the most urgent."""
DEFAULT_PRIORITY = 5


@dataclass(frozen=True)
class Option:
    """A generation option: `kind` is the wire type, `default` what an absent option means (None: decided later)."""

    name: str
    kind: type
    default: Any
    rule: str
    read: Read = lambda value: value


_BOOL = "must be true or false"
_NAME = f"must be a string of 1 to {MAX_NAME_LENGTH} printable characters"
_PENALTY = "must be a number in [-2, 2]; 0 is none"
_TIMEOUT = f"must be an integer in [1, {MAX_TIMEOUT_MS}] milliseconds"
_top_logprobs = read.within(0, MAX_TOP_LOGPROBS)
_timeout = read.within(1, MAX_TIMEOUT_MS)

OPTIONS = {
    option.name: option
    for option in (
        # how long
        Option(
            "max_tokens", int, 128, "must be an integer in [1, max_model_len - prompt_tokens]", read.within(1, 2**31)
        ),
        Option("min_tokens", int, 0, "must be an integer in [0, max_tokens]", read.within(0, 2**31)),
        Option(
            "stop",
            str,
            (),
            f"must be a string, or a JSON list of 1 to {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_LENGTH} "
            "characters",
            read.strings(MAX_STOP_STRINGS, MAX_STOP_LENGTH),
        ),
        Option(
            "stop_token_ids", str, (), f"must be a JSON list of 1 to {MAX_BIASES} token ids", read.token_ids(MAX_BIASES)
        ),
        Option("include_stop_in_output", bool, False, _BOOL),
        Option("ignore_eos", bool, False, _BOOL),
        # how a token is drawn
        Option("temperature", float, 0.0, "must be a finite number in [0, 100]; 0 is greedy", read.within(0, 100)),
        Option("top_k", int, 0, "must be an integer in [0, vocab_size]; 0 keeps all tokens", read.within(0, 2**31)),
        Option("top_p", float, 1.0, "must be a number in (0, 1]", read.within(0, 1, open_low=True)),
        Option("min_p", float, 0.0, "must be a number in [0, 1]; 0 keeps all tokens", read.within(0, 1)),
        Option("seed", int, None, "must be an integer in [0, 2**63 - 1]", read.within(0, 2**63 - 1)),
        Option(
            "repetition_penalty",
            float,
            1.0,
            "must be a number in (0, 10]; 1 is none",
            read.within(0, 10, open_low=True),
        ),
        Option("presence_penalty", float, 0.0, _PENALTY, read.within(-2, 2)),
        Option("frequency_penalty", float, 0.0, _PENALTY, read.within(-2, 2)),
        Option(
            "logit_bias",
            str,
            (),
            f"must be a JSON object of 1 to {MAX_BIASES} token ids, each with a number in [-100, 100]",
            read.biases(MAX_BIASES, MAX_BIAS),
        ),
        Option(
            "bad_words",
            str,
            (),
            f"must be a string, or a JSON list of 1 to {MAX_BAD_WORDS} strings, each of 1 to {MAX_STOP_LENGTH} "
            "characters",
            read.strings(MAX_BAD_WORDS, MAX_STOP_LENGTH),
        ),
        Option("n", int, 1, f"must be an integer in [1, {MAX_SAMPLES}]", read.within(1, MAX_SAMPLES)),
        # what the answer must look like
        Option("json_object", bool, False, _BOOL),
        Option("json_schema", str, None, "must be a JSON schema: a JSON object, true or false", read.json_schema),
        Option("regex", str, None, "must be a regular expression that is not empty", read.not_empty),
        Option("grammar", str, None, "must be a grammar that is not empty", read.not_empty),
        Option("choice", str, None, "must be a JSON list of strings that are not empty", read.choices),
        # what is told
        Option("logprobs", int, None, f"must be an integer in [0, {MAX_TOP_LOGPROBS}]", _top_logprobs),
        Option("prompt_logprobs", int, None, f"must be an integer in [0, {MAX_TOP_LOGPROBS}]", _top_logprobs),
        Option("echo", bool, False, _BOOL),
        Option("stream", bool, False, _BOOL),
        Option(
            "stream_interval_ms", int, None, "must be an integer in [0, 10000]; 0 sends at once", read.within(0, 10000)
        ),
        # when it is served
        Option(
            "priority_class",  # Triton's gRPC endpoint takes a parameter called `priority` for itself, and drops it
            int,
            DEFAULT_PRIORITY,
            f"must be an integer in [0, {PRIORITIES - 1}]; 0 is the most urgent",
            read.within(0, PRIORITIES - 1),
        ),
        Option("tenant", str, "", _NAME, read.name),
        Option("queue_timeout_ms", int, None, _TIMEOUT, _timeout),
        Option("timeout_ms", int, None, _TIMEOUT, _timeout),
        Option("cache_salt", str, "", _NAME, read.name),
        Option("speculate", bool, True, _BOOL),
        Option(
            "traceparent",
            str,
            "",
            "must be a traceparent of W3C's Trace Context: 00-, 32 hexadecimal digits, -, 16, -, 2, in lower case",
            read.traceparent,
        ),
        # how text becomes a prompt
        Option("chat", bool, False, "must be true or false; true renders text_input as one user message"),
        Option("messages", str, None, 'must be a JSON list of {"role", "content"} objects, with an empty text_input'),
        Option("tools", str, None, "must be a JSON list of tools, with chat or messages"),
        Option("add_generation_prompt", bool, True, _BOOL),
        Option("truncate", str, "none", "must be none or oldest", read.one_of("none", "oldest")),
        Option("cancel", str, None, "must be the id of a request, sent alone to the decoder", read.not_empty),
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
            raise InvalidRequest(f"unknown option {shown(name)}; known options: {', '.join(sorted(OPTIONS))}")
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
        raise InvalidRequest(f"{option.name} {option.rule}, got {shown(value)}")
    try:
        return option.read(typed)
    except ValueError as error:
        why = f": {error}" if str(error) else ""
        raise InvalidRequest(f"{option.name} {option.rule}, got {shown(value)}{why}") from None


def _typed(kind: type, value: Any) -> Any:
    """`value` as `kind`, or None: a whole number is a float too, true is no number, "1" is no number, text is UTF-8."""
    if kind is float and type(value) is int:
        return float(value) if abs(value) <= sys.float_info.max else None
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        return None
    return None if kind is str and not _is_utf8(value) else value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """`value` for an error's text, in 80 characters at most."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of over 4300 digits; a list nested too deeply
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."

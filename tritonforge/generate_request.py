"""What is asked: the validated GenerateRequest. No clock, no threads, no Triton here.

`GenerateRequest.from_wire` is the only door: code behind it never sees an unvalidated value.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritonforge.errors import InvalidRequest
from tritonforge.options import DEFAULT_PRIORITY, OPTIONS, given_structure, parse_options, shown

Encode = Callable[[str], list[int]]
"""Token ids of a text, without special tokens around it."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn, in the order of the fields; temperature 0 is greedy. `seed` None: the server draws.

    `logit_bias` holds (token id, bias) pairs, `bad_words` sequences of token ids whose last one is then forbidden;
    `logprobs` is the number of most likely tokens to tell with each drawn one (None: not even that one's).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model and its configuration allow one request to be."""

    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One validated request; `prompt_ids` is not empty and prompt plus max_tokens fits max_model_len.

    The fields are options of the same names, see options.py. `structure` is the one of options.STRUCTURES that was
    given with its value; `truncated_tokens` says how many tokens the prompt had more before it was truncated.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_in_output: bool = False
    ignore_eos: bool = False
    structure: tuple[str, Any] | None = None
    tools: str | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    stream_interval_ms: int | None = None
    priority: int = DEFAULT_PRIORITY
    tenant: str = ""
    queue_timeout_ms: int | None = None
    timeout_ms: int | None = None
    cache_salt: str = ""
    speculate: bool = True
    traceparent: str = ""
    truncated_tokens: int = 0
    request_id: str = ""

    @classmethod
    def from_wire(
        cls,
        prompt_ids: Sequence[int],
        options: Mapping[str, Any],
        limits: Limits,
        request_id: str = "",
        *,
        encode: Encode | None = None,
        truncated_tokens: int = 0,
    ) -> "GenerateRequest":
        """Build from token ids and raw request parameters; `encode` makes token ids of bad_words.

        Raises InvalidRequest naming field, value and rule.
        """
        values = parse_options(options)
        check_prompt(prompt_ids, limits)
        room = limits.max_model_len - len(prompt_ids)
        max_tokens = min(OPTIONS["max_tokens"].default, room) if values["max_tokens"] is None else values["max_tokens"]
        if not 1 <= max_tokens <= room:
            raise InvalidRequest(
                f"max_tokens must be in [1, {room}] (max_model_len {limits.max_model_len} minus {len(prompt_ids)} "
                f"prompt tokens), got {max_tokens}"
            )
        if values["min_tokens"] > max_tokens:
            raise InvalidRequest(f"min_tokens must be in [0, {max_tokens}], got {values['min_tokens']}")
        check_token_ids(values, limits.vocab_size)
        values |= {
            "max_tokens": max_tokens,
            "bad_words": encode_bad_words(values["bad_words"], encode),
            "structure": given_structure(values),
        }
        sampling = SamplingParams(**{name: values[name] for name in SamplingParams.__dataclass_fields__})
        own = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            truncated_tokens=truncated_tokens,
            request_id=request_id,
            **own,
        )


def encode_bad_words(words: Sequence[str], encode: Encode | None) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word at the start of a text and after a space, as in vLLM's SamplingParams."""
    if words and encode is None:
        raise InvalidRequest("bad_words is not available here: there is no tokenizer")
    spellings = (encode(text) for word in words for text in (word, " " + word.lstrip()))
    return tuple(dict.fromkeys(tuple(token_ids) for token_ids in spellings if token_ids))


def check_token_ids(values: Mapping[str, Any], vocab_size: int) -> None:
    """Raise InvalidRequest when an option names or counts tokens that the model does not have."""
    if values["top_k"] > vocab_size:
        raise InvalidRequest(f"top_k must be in [0, {vocab_size}], got {values['top_k']}")
    for name, token_ids in (
        ("stop_token_ids", values["stop_token_ids"]),
        ("logit_bias", [token_id for token_id, _ in values["logit_bias"]]),
    ):
        if token_ids and max(token_ids) >= vocab_size:
            raise InvalidRequest(f"{name} must hold token ids in [0, {vocab_size - 1}], got {max(token_ids)}")


def check_prompt(prompt_ids: Sequence[int], limits: Limits) -> None:
    """Raise InvalidRequest when the prompt is empty, leaves no room for an answer, or holds an unknown token id."""
    if not prompt_ids:
        raise InvalidRequest("input_ids must hold at least one token: the prompt is empty")
    if len(prompt_ids) >= limits.max_model_len:
        raise InvalidRequest(
            f"the prompt must be shorter than max_model_len {limits.max_model_len} tokens, got {len(prompt_ids)}"
        )
    for token_id in (min(prompt_ids), max(prompt_ids)):
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(f"input_ids must be in [0, {limits.vocab_size - 1}], got {shown(token_id)}")

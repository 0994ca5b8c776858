"""What is asked, and how far it is: the validated GenerateRequest, and the Request that the scheduler moves along.

`parse_options` is the only door: code behind it never sees an unvalidated value. No clock, no threads, no Triton here.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from tritonforge.contract import OPTIONS
from tritonforge.errors import InvalidRequest

MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256


class FinishReason(StrEnum):
    """Why a request ended: an end token or stop string, max_tokens, cancellation, or an error."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Phase(Enum):
    """Which of the scheduler's hands holds a request."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn; temperature 0 is greedy. `seed` None: the server draws one."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model and its configuration allow one request to be."""

    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One validated request; `prompt_ids` is not empty and prompt plus max_tokens fits max_model_len."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    request_id: str = ""

    @classmethod
    def from_wire(
        cls, prompt_ids: Sequence[int], options: Mapping[str, Any], limits: Limits, request_id: str = ""
    ) -> "GenerateRequest":
        """Build from token ids and raw request parameters. Raises InvalidRequest naming field, value and rule."""
        values = parse_options(options)
        check_prompt(prompt_ids, limits)
        room = limits.max_model_len - len(prompt_ids)
        max_tokens = min(OPTIONS["max_tokens"].default, room) if values["max_tokens"] is None else values["max_tokens"]
        if not 1 <= max_tokens <= room:
            raise InvalidRequest(
                f"max_tokens must be in [1, {room}] (max_model_len {limits.max_model_len} minus {len(prompt_ids)} "
                f"prompt tokens), got {max_tokens}"
            )
        if values["top_k"] > limits.vocab_size:
            raise InvalidRequest(f"top_k must be in [0, {limits.vocab_size}], got {values['top_k']}")
        sampling = SamplingParams(values["temperature"], values["top_k"], values["top_p"], values["seed"])
        return cls(
            prompt_ids=tuple(prompt_ids),
            max_tokens=max_tokens,
            sampling=sampling,
            stop=values["stop"],
            ignore_eos=values["ignore_eos"],
            stream=values["stream"],
            request_id=request_id,
        )


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
            raise InvalidRequest(f"input_ids must be in [0, {limits.vocab_size - 1}], got {token_id}")


def parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the contract with its checked value, defaults filled in; max_tokens stays None when absent.

    Raises InvalidRequest for an unknown name, a wrong type or a value outside its rule.
    """
    for name in options:
        if name not in OPTIONS:
            raise InvalidRequest(f"unknown option {name!r}; known options: {', '.join(sorted(OPTIONS))}")
    values = {name: option.default for name, option in OPTIONS.items()} | {"max_tokens": None}
    for name, value in options.items():
        values[name] = _checked(name, value)
    return values


def _checked(name: str, value: Any) -> Any:
    option = OPTIONS[name]
    typed = _typed(option.kind, value)
    if typed is None or not _IN_RANGE.get(name, lambda _: True)(typed):
        raise InvalidRequest(f"{name} {option.rule}, got {_shown(value)}")
    return _stop_strings(typed) if name == "stop" else typed


def _typed(kind: type, value: Any) -> Any:
    """`value` as `kind`, or None: a whole number is a float too, true is no number, "1" is no number."""
    if kind is float and type(value) is int:
        return float(value)
    return value if type(value) is kind else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse_json(name: str, value: str) -> Any:
    """The JSON that the option `name` holds. Raises InvalidRequest when it is none, or holds what is no UTF-8 text."""
    try:
        parsed = json.loads(value)
        json.dumps(parsed, ensure_ascii=False).encode()  # half of a surrogate pair is legal JSON, and no text
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} must be JSON: {str(error)[:80] or type(error).__name__}") from None
    return parsed


def _stop_strings(value: str) -> tuple[str, ...]:
    """A plain string is one stop string; text that starts with [ is a JSON list of them."""
    strings = parse_json("stop", value) if value.startswith("[") else [value]
    if (
        not 1 <= len(strings) <= MAX_STOP_STRINGS
        or not all(isinstance(text, str) for text in strings)
        or not all(1 <= len(text) <= MAX_STOP_LENGTH for text in strings)
    ):
        raise InvalidRequest(f"stop {OPTIONS['stop'].rule}, got {_shown(value)}")
    return tuple(strings)


_IN_RANGE = {
    "max_tokens": lambda value: value >= 1,
    "temperature": lambda value: math.isfinite(value) and 0.0 <= value <= MAX_TEMPERATURE,
    "top_k": lambda value: value >= 0,
    "top_p": lambda value: 0.0 < value <= 1.0,
    "seed": lambda value: 0 <= value < 2**63,
}


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the scheduler: what it owes is num_tokens - num_computed_tokens.

    `key` is unique in the process (a client's request_id need not be). Preemption sets num_computed_tokens back to 0
    and drops the blocks; the tokens stay, so nothing already answered changes.
    """

    key: int
    prompt_ids: Sequence[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start to stop - 1 of prompt followed by output."""
        split = len(self.prompt_ids)
        if start >= split:
            return self.output_ids[start - split : stop - split]
        if stop <= split:
            return list(self.prompt_ids[start:stop])
        return [*self.prompt_ids[start:], *self.output_ids[: stop - split]]


@dataclass(frozen=True, slots=True)
class Work:
    """One request's share of a step: compute `num_new_tokens` from num_computed_tokens on, sample when `samples`."""

    request: Request
    num_new_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes, in batch order, and who was preempted to make room for it."""

    work: tuple[Work, ...]
    preempted: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step: at most max_num_batched_tokens."""
        return sum(work.num_new_tokens for work in self.work)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token of a request, and its finish reason when it was the last."""

    request: Request
    token_id: int
    finish_reason: FinishReason | None

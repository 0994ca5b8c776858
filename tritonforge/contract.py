"""Names, types and shapes of every tensor and option of the served models: the one table of the wire contract.

The model.py files, the clients and the load tests read it; config.pbtxt files are rendered from it and a test compares
them. Options travel as Triton request parameters (scalars), so a list or a chat travels as a JSON string.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tensor:
    """A tensor without its batch dimension; `final_only` marks what only the last response of a request carries."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False
    final_only: bool = False


@dataclass(frozen=True)
class Option:
    """A generation option: `kind` is its Python type, `default` what an absent option means (None: decided later)."""

    name: str
    kind: type
    default: Any
    rule: str


TEXT_INPUT = Tensor("text_input", "TYPE_STRING", (1,))
INPUT_IDS = Tensor("input_ids", "TYPE_INT32", (-1,))
TEXT_OUTPUT = Tensor("text_output", "TYPE_STRING", (1,))
TOKEN_IDS = Tensor("token_ids", "TYPE_INT32", (-1,))
FINISH_REASON = Tensor("finish_reason", "TYPE_STRING", (1,), final_only=True)

USAGE = ("prompt_tokens", "completion_tokens", "cached_tokens")
PHASES = ("queue_us", "prefill_us", "first_emit_us", "decode_us")
"""Durations in integer microseconds: arrival to first scheduled step; to the first sampled token; to the moment its
response was handed to Triton; and from the first sampled token to the last one."""
COUNTS = ("decode_steps", "preemptions")
STATISTICS = tuple(Tensor(name, "TYPE_INT64", (1,), final_only=True) for name in USAGE + PHASES + COUNTS)

DECODER_INPUTS = (Tensor("input_ids", "TYPE_INT32", (-1,), optional=True),)
DECODER_OUTPUTS = (TEXT_OUTPUT, TOKEN_IDS, FINISH_REASON, *STATISTICS)

OPTIONS = {
    option.name: option
    for option in (
        Option("max_tokens", int, 128, "must be an integer in [1, max_model_len - prompt_tokens]"),
        Option("temperature", float, 0.0, "must be a finite number in [0, 100]; 0 is greedy"),
        Option("top_k", int, 0, "must be an integer in [0, vocab_size]; 0 keeps all tokens"),
        Option("top_p", float, 1.0, "must be a number in (0, 1]"),
        Option("seed", int, None, "must be an integer in [0, 2**63 - 1]"),
        Option("stop", str, (), "must be a string, or a JSON list of 1 to 16 strings, each of 1 to 256 characters"),
        Option("ignore_eos", bool, False, "must be true or false"),
        Option("stream", bool, False, "must be true or false"),
        Option("chat", bool, False, "must be true or false; true renders text_input as one user message"),
        Option("messages", str, None, 'must be a JSON list of {"role", "content"} objects, with an empty text_input'),
        Option("cancel", str, None, "must be the id of a request, sent alone to the decoder"),
    )
}

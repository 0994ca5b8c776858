"""Names, types and shapes of every tensor of the served models: the one table of the wire contract.

The model.py files, the clients and the load tests read it; config.pbtxt files are rendered from it and a test compares
them. Generation options are in options.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """A tensor without its batch dimension; an `optional` input may be left out, an optional output may be absent."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False


TEXT_INPUT = Tensor("text_input", "TYPE_STRING", (1,))
INPUT_IDS = Tensor("input_ids", "TYPE_INT32", (-1,))
PROMPT_TRUNCATED_TOKENS = Tensor("prompt_truncated_tokens", "TYPE_INT32", (1,))

TEXT_OUTPUT = Tensor("text_output", "TYPE_STRING", (-1,))
TOKEN_IDS = Tensor("token_ids", "TYPE_INT32", (-1,))
FINISH_REASON = Tensor("finish_reason", "TYPE_STRING", (-1,), optional=True)
"""One text and, when one of them has ended, one reason for each answer of the response; "" for one that goes on."""
INDEX = Tensor("index", "TYPE_INT32", (-1,), optional=True)
TOKEN_COUNTS = Tensor("token_counts", "TYPE_INT32", (-1,), optional=True)
"""With n > 1: which answers the texts of a response belong to, and how many of its token_ids belong to each."""
LOGPROBS = Tensor("logprobs", "TYPE_FP32", (-1,), optional=True)
TOP_IDS = Tensor("top_ids", "TYPE_INT32", (-1, -1), optional=True)
TOP_LOGPROBS = Tensor("top_logprobs", "TYPE_FP32", (-1, -1), optional=True)
"""One row for each of token_ids: its log-probability, and the most likely tokens with theirs, most likely first."""
PROMPT_TOKEN_IDS = Tensor("prompt_token_ids", "TYPE_INT32", (-1,), optional=True)
PROMPT_LOGPROBS = Tensor("prompt_logprobs", "TYPE_FP32", (-1,), optional=True)
PROMPT_TOP_IDS = Tensor("prompt_top_ids", "TYPE_INT32", (-1, -1), optional=True)
PROMPT_TOP_LOGPROBS = Tensor("prompt_top_logprobs", "TYPE_FP32", (-1, -1), optional=True)
"""In an answer's first response; log-probabilities are those of the prompt's second token and the ones after it."""
TOOL_CALLS = Tensor("tool_calls", "TYPE_STRING", (-1,), optional=True)
"""With tools: the calls of each answer that ended, as a JSON list of {"id", "name", "arguments"}."""

USAGE = ("prompt_tokens", "completion_tokens", "cached_tokens")
PHASES = ("queue_us", "prefill_us", "first_emit_us", "decode_us")
"""Durations in integer microseconds: arrival to first scheduled step; to the first sampled token; to the moment its
response was handed to Triton; and from the first sampled token to the last one."""
COUNTS = ("decode_steps", "preemptions", "draft_tokens", "accepted_tokens", "truncated_tokens")
STATISTICS = tuple(Tensor(name, "TYPE_INT64", (1,), optional=True) for name in (*USAGE, *PHASES, *COUNTS))
"""Only the last response of a request carries them."""

DECODER_INPUTS = (
    Tensor("input_ids", "TYPE_INT32", (-1,), optional=True),
    Tensor("prompt_truncated_tokens", "TYPE_INT32", (1,), optional=True),
)
"""Optional, because a request whose only parameter is `cancel` has no prompt."""
DECODER_OUTPUTS = (
    TEXT_OUTPUT,
    TOKEN_IDS,
    FINISH_REASON,
    INDEX,
    TOKEN_COUNTS,
    LOGPROBS,
    TOP_IDS,
    TOP_LOGPROBS,
    PROMPT_TOKEN_IDS,
    PROMPT_LOGPROBS,
    PROMPT_TOP_IDS,
    PROMPT_TOP_LOGPROBS,
    TOOL_CALLS,
    *STATISTICS,
)

MAX_TEXT_BYTES = 1 << 20
"""Longest text_input that is tokenized at all; what fits the context is decided in tokens."""


@dataclass(frozen=True)
class ServedModel:
    """One model of the repository: its tensors and how Triton runs it."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    max_batch_size: int
    decoupled: bool = False
    dynamic_batching: bool = False
    steps: tuple[str, ...] = ()


TOKENIZER = ServedModel(
    "tokenizer", (TEXT_INPUT,), (INPUT_IDS, PROMPT_TRUNCATED_TOKENS), max_batch_size=64, dynamic_batching=True
)
DECODER = ServedModel("decoder", DECODER_INPUTS, DECODER_OUTPUTS, max_batch_size=1, decoupled=True)
LLM = ServedModel("llm", (TEXT_INPUT,), DECODER_OUTPUTS, max_batch_size=1, steps=("tokenizer", "decoder"))
SERVED_MODELS = {model.name: model for model in (TOKENIZER, DECODER, LLM)}


def render_config(model: ServedModel) -> str:
    """The config.pbtxt of `model`, in protobuf text format."""
    kind = 'platform: "ensemble"' if model.steps else 'backend: "python"'
    parts = [f'name: "{model.name}"', kind, f"max_batch_size: {model.max_batch_size}"]
    parts += [_render_tensor("input", tensor) for tensor in model.inputs]
    parts += [_render_tensor("output", tensor) for tensor in model.outputs]
    if model.decoupled:
        parts.append("model_transaction_policy { decoupled: true }")
    if model.dynamic_batching:
        parts.append("dynamic_batching { }")
    if model.steps:
        parts.append(
            "ensemble_scheduling {\n" + "".join(_render_step(SERVED_MODELS[name]) for name in model.steps) + "}"
        )
    else:
        parts.append("instance_group [ { count: 1, kind: KIND_CPU } ]")
    return "\n".join(parts) + "\n"


def _render_tensor(role: str, tensor: Tensor) -> str:
    optional = ", optional: true" if role == "input" and tensor.optional else ""
    dims = ", ".join(str(size) for size in tensor.dims)
    return f'{role} [ {{ name: "{tensor.name}", data_type: {tensor.dtype}, dims: [ {dims} ]{optional} }} ]'


def _render_step(model: ServedModel) -> str:
    """An ensemble step whose tensors keep their names from model to model."""
    lines = [f'  step [ {{\n    model_name: "{model.name}"\n    model_version: -1\n']
    lines += [f'    input_map {{ key: "{tensor.name}", value: "{tensor.name}" }}\n' for tensor in model.inputs]
    lines += [f'    output_map {{ key: "{tensor.name}", value: "{tensor.name}" }}\n' for tensor in model.outputs]
    return "".join([*lines, "  } ]\n"])

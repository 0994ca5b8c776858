"""The OpenVINO engine: one inference per step over a ragged batch, with a paged, quantized KV cache, on a CPU.

A release stores the stateful model that optimum-intel exports; it is rewritten to paged attention when it is loaded,
because OpenVINO cannot read a rewritten file back. The engine knows nothing of requests or scheduling.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

from tritonforge.engines.base import EngineSpec, SequenceStep
from tritonforge.errors import EngineFailure, InvalidRequest
from tritonforge.memory.available import available_bytes, release_mapped_pages
from tritonforge.memory.plan import MIB, fit_num_blocks

log = logging.getLogger(__name__)

BLOCK_SIZE = 32
"""Tokens in a KV block: fixed by the paged attention kernel of OpenVINO's CPU plugin."""

PREFILL_MIN_TOKENS = 64
"""A step of at least so many tokens is computed with prefill_properties: int8 weights with bfloat16 activations (AMX)
computed 512 tokens 2.3 times as fast as with float32 ones, which are faster for one token of 1 to 16 sequences."""

PADDED_ABOVE = 16
DECODE_MULTIPLE = 4
PREFILL_MULTIPLE = 32
PREFILL_ROWS_MULTIPLE = 8
"""Steps of more than PADDED_ABOVE tokens are padded to a multiple, and so are the rows of their logits. OpenVINO makes
kernels for every new count and keeps them: 15 to 20 ms and 1.7 MiB each were seen. Multiples of 32 tokens are faster
anyway: 256 took 75 ms, 257 took 101 ms."""

SPARE_BLOCKS = 1
"""Blocks beyond those of the spec: the first of them takes what padding writes."""

WARM_UP_BLOCKS = -(-PREFILL_MIN_TOKENS // BLOCK_SIZE)

MODEL = "openvino_model.xml"
WEIGHTS = "openvino_model.bin"

DEFAULT_PROPERTIES = {"PERFORMANCE_HINT": "LATENCY"}


def read_paged_model(model_dir: Path) -> ov.Model:
    """Read the stateful model of `model_dir` and rewrite it to paged attention, with logits for `sampled_rows` only."""
    model = ov.Core().read_model(model_dir / MODEL)
    paged_attention_transformation(model)
    _gather_before_lm_head(model)
    return model


def _gather_before_lm_head(model: ov.Model) -> None:
    """Add the input `sampled_rows` [rows] int64 and compute logits for those rows of the flat batch only."""
    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    rows = ops.parameter([-1], np.int64, name="sampled_rows")
    rows.output(0).set_names({"sampled_rows"})
    hidden = ops.gather(node.input_value(0), rows, ops.constant(0, np.int64))
    node.input(0).replace_source_output(hidden.output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()


def compile_paged_model(model: ov.Model, kv_cache_precision: str, properties: dict[str, Any]) -> ov.CompiledModel:
    """Compile for the CPU; `properties` are OpenVINO's own and override DEFAULT_PROPERTIES."""
    wanted = {**DEFAULT_PROPERTIES, "KV_CACHE_PRECISION": kv_cache_precision, **properties}
    return ov.Core().compile_model(model, "CPU", wanted)


def cache_ports(compiled: ov.CompiledModel) -> list[ov.ConstOutput]:
    """The inputs that hold the KV cache: one key and one value port a layer, [num_blocks, kv_heads, rows, width]."""
    return [port for port in compiled.inputs if port.get_any_name().startswith(("key_cache.", "value_cache."))]


def bytes_per_block(compiled: ov.CompiledModel) -> int:
    """Bytes that one KV block takes over all layers, quantization parameters included."""
    total = 0
    for port in cache_ports(compiled):
        heads, rows, width = (port.get_partial_shape()[axis].get_length() for axis in (1, 2, 3))
        total += heads * rows * width * port.get_element_type().size
    return total


class OpenVINOEngine:
    """Engine protocol over OpenVINO's paged attention; `config` is the engine_config of decoder.json.

    With prefill_properties the model is compiled twice; both share its weights, mapped from the file, and one KV cache.
    With fit_memory, num_blocks is the most: the KV cache takes what memory there is at load, less `reserve_mib` MiB.
    """

    def __init__(self, model_dir: Path, config: dict[str, Any]) -> None:
        if config["block_size"] != BLOCK_SIZE:
            raise InvalidRequest(f"block_size must be {BLOCK_SIZE} for the openvino engine, got {config['block_size']}")
        self.spec = EngineSpec(**{name: config[name] for name in EngineSpec.__dataclass_fields__})

        model = read_paged_model(Path(model_dir))

        def load(properties: dict[str, Any]) -> CompiledStep:
            return CompiledStep(compile_paged_model(model, config["kv_cache_precision"], properties))

        self._decode = load(config["properties"])
        self._prefill = self._decode
        if config["prefill_properties"]:
            self._prefill = load(config["properties"] | config["prefill_properties"])
        self._allocate_cache(WARM_UP_BLOCKS)
        self._warm_up()
        release_mapped_pages(Path(model_dir) / WEIGHTS)
        if "fit_memory" in config:
            self.spec = replace(self.spec, num_blocks=self._num_blocks_that_fit(**config["fit_memory"]))
        self._allocate_cache(self.spec.num_blocks + SPARE_BLOCKS)

    def _warm_up(self) -> None:
        """A step of each kind: the first copies the weights to the layout of its kernels. After it, the embedding alone
        is read from the file's mapping."""
        for count in (1, PREFILL_MIN_TOKENS):
            self.step([SequenceStep([0] * count, 0, range(WARM_UP_BLOCKS))])

    def _num_blocks_that_fit(self, reserve_mib: int) -> int:
        """As many KV blocks as this process may still take, at most those of the spec; weights are in memory by now."""
        free = available_bytes()
        block_bytes = bytes_per_block(self._decode.compiled)
        blocks = fit_num_blocks(
            self.spec.num_blocks,
            max_model_len=self.spec.max_model_len,
            block_size=BLOCK_SIZE,
            block_bytes=block_bytes,
            spare_blocks=SPARE_BLOCKS,
            free_bytes=free - reserve_mib * MIB,
        )
        log.warning(
            "KV cache: %d of at most %d blocks, %d tokens, %d MiB; %d MiB were free, %d of them stay in reserve",
            blocks,
            self.spec.num_blocks,
            blocks * BLOCK_SIZE,
            blocks * block_bytes // MIB,
            free // MIB,
            reserve_mib,
        )
        return blocks

    def _allocate_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache and touch all of it: memory that is not there is missed now, not by a request."""
        self._cache: list[ov.Tensor] = []
        for port in cache_ports(self._decode.compiled):
            heads, rows, width = (port.get_partial_shape()[axis].get_length() for axis in (1, 2, 3))
            tensor = ov.Tensor(port.get_element_type(), ov.Shape([num_blocks, heads, rows, width]))
            tensor.data[...] = 0
            for compiled in (self._decode, self._prefill):
                compiled.request.set_tensor(port.get_any_name(), tensor)
            self._cache.append(tensor)

    def step(self, sequences: Sequence[SequenceStep]) -> np.ndarray:
        """See Engine.step."""
        count = sum(len(sequence.token_ids) for sequence in sequences)
        padding = SequenceStep([0] * (padded(count) - count), 0, [self.spec.num_blocks], num_logits=0)
        inputs = ragged_inputs([*sequences, padding] if padding.token_ids else sequences, self.spec.block_size)
        rows = len(inputs["sampled_rows"])
        prefill = len(inputs["input_ids"]) >= PREFILL_MIN_TOKENS
        unread = padded_rows(rows, prefill=prefill) - rows
        inputs["sampled_rows"] = np.append(inputs["sampled_rows"], np.zeros(unread, np.int64))
        compiled = self._prefill if prefill else self._decode
        try:
            logits = compiled.run(inputs)
        except RuntimeError as error:
            raise EngineFailure(f"openvino could not compute the step: {str(error).splitlines()[0]}") from error
        return logits.reshape(-1, self.spec.vocab_size)[:rows]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See Engine.copy_blocks."""
        for source, destination in copies:
            for tensor in self._cache:
                tensor.data[destination] = tensor.data[source]

    def close(self) -> None:
        """See Engine.close."""
        del self._decode, self._prefill, self._cache


class CompiledStep:
    """A compiled model with its one inference request."""

    def __init__(self, compiled: ov.CompiledModel) -> None:
        self.compiled = compiled
        self.request = compiled.create_infer_request()
        self._ports = {port.get_any_name(): port for port in compiled.inputs}
        self._logits = compiled.outputs[0]

    def run(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """Infer and return the logits, which the next run overwrites. The caller keeps `inputs` alive meanwhile."""
        for name, array in inputs.items():
            self.request.set_tensor(self._ports[name], ov.Tensor(array, shared_memory=True))
        self.request.infer()
        return self.request.get_tensor(self._logits).data


def padded(num_tokens: int) -> int:
    """The number of tokens that a step of `num_tokens` computes, so that few different numbers occur."""
    if num_tokens <= PADDED_ABOVE:
        return num_tokens
    multiple = DECODE_MULTIPLE if num_tokens < PREFILL_MIN_TOKENS else PREFILL_MULTIPLE
    return -(-num_tokens // multiple) * multiple


def padded_rows(num_rows: int, *, prefill: bool) -> int:
    """The number of rows that a step computes logits for: at least one, which the LM head needs to work on."""
    if prefill:
        return max(1, -(-num_rows // PREFILL_ROWS_MULTIPLE)) * PREFILL_ROWS_MULTIPLE
    return max(1, padded(num_rows))


def ragged_inputs(sequences: Sequence[SequenceStep], block_size: int) -> dict[str, np.ndarray]:
    """Flatten `sequences` to the inputs of OpenVINO's paged attention.

    With begins = [0, 3, 4] the first sequence owns rows 0 to 2 of the flat batch and the second owns row 3; blocks are
    flattened the same way. `sampled_rows` lists the rows whose logits are wanted.
    """
    past = [sequence.num_computed_tokens for sequence in sequences]
    begins = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum([len(sequence.token_ids) for sequence in sequences], out=begins[1:])
    ends = [start + len(sequence.token_ids) for start, sequence in zip(past, sequences, strict=True)]
    used = [-(-end // block_size) for end in ends]
    block_begins = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(used, out=block_begins[1:])
    blocks = chain.from_iterable(sequence.block_table[:count] for sequence, count in zip(sequences, used, strict=True))
    sampled = [
        range(end - sequence.num_logits, end)
        for (_, end), sequence in zip(pairwise(begins.tolist()), sequences, strict=True)
    ]
    positions = [np.arange(start, end, dtype=np.int64) for start, end in zip(past, ends, strict=True)]
    return {
        "input_ids": np.fromiter(chain.from_iterable(s.token_ids for s in sequences), np.int64, begins[-1]),
        "position_ids": np.concatenate(positions),
        "past_lens": np.array(past, np.int32),
        "subsequence_begins": begins,
        "block_indices": np.fromiter(blocks, np.int32, block_begins[-1]),
        "block_indices_begins": block_begins,
        "max_context_len": np.array(max(ends), np.int32),
        "sampled_rows": np.fromiter(chain.from_iterable(sampled), np.int64),
    }

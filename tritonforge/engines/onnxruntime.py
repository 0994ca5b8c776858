"""The ONNX Runtime engine: a step graph, the file that TensorRT compiles, on a CPU with its linear KV cache in place.

The cache is allocated once. Past and present of a call are bound to the same addresses in it, so ONNX Runtime writes
the new keys and values where they belong and copies nothing. The engine knows nothing of requests or scheduling.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from tritonforge.engines.base import EngineSpec
from tritonforge.engines.linear import LinearEngine, cache_len_for
from tritonforge.engines.linear_calls import CallLimits, LinearCall
from tritonforge.errors import EngineFailure, InvalidRequest, ReleaseMismatch
from tritonforge.memory.available import available_bytes
from tritonforge.memory.plan import MIB

MODEL = "model.onnx"
WEIGHTS = "model.onnx.data"
FACTS = "graph.json"

KV_DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}
"""By kv_cache_precision: the element types that Attention has a kernel for in ONNX Runtime's CPU provider."""

FIRST_VIEW = 256
NARROW_TOKENS = 16
MAX_TOKENS = 1024
MAX_LOGIT_ROWS = 256
CALL_COST = 16
"""In tokens. Attention's kernel computes all positions that it sees, masked or not, so a call sees a view of the cache:
FIRST_VIEW positions, or twice as many, and so on. SmolLM2-135M in float32, 2 cores, 200 tokens of context: a decode
step of 1 and 16 sequences took 22 and 46 ms seeing 256 positions, 28 and 110 ms seeing 2112; a prefill of 128 tokens
134 and 363 ms. From one to 16 rows a decode step grows by 1.5 ms a row: what a call costs beyond that is 14 rows."""

ALIGNMENT = 64

PROPERTIES = ("intra_op_num_threads", "allow_spinning")
"""What a recipe may set: threads (0: one for each core), and whether they wait for work without sleeping in a step."""


@dataclass(frozen=True)
class CacheLayer:
    """One of the graph's caches, keys or values of a layer: `buffer` is flat and holds all rows one after the other."""

    name: str
    kv_heads: int
    head_size: int
    buffer: np.ndarray

    def rows(self, num_rows: int, cache_len: int) -> np.ndarray:
        """The rows [num_rows, kv_heads, cache_len, head_size], as they lie when calls see `cache_len` positions."""
        shape = (num_rows, self.kv_heads, cache_len, self.head_size)
        return self.buffer[: int(np.prod(shape))].reshape(shape)


def read_facts(model_dir: Path) -> dict[str, Any]:
    """The content of graph.json; ReleaseMismatch when it is missing or does not describe a step graph."""
    path = model_dir / FACTS
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        layers = [(int(layer["kv_heads"]), int(layer["head_size"])) for layer in facts["layers"]]
        known = facts["format"] == "onnx" and facts["num_layers"] == len(layers) > 0
        if not known or min(min(pair) for pair in layers) < 1 or not isinstance(facts["kv_dtype"], str):
            raise ValueError("format, num_layers, layers or kv_dtype")
        int(facts["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReleaseMismatch(f"{path} does not describe an ONNX step graph: {error!r}") from None
    return facts


def check_config(facts: dict[str, Any], config: dict[str, Any]) -> None:
    """Refuse a configuration that the graph cannot serve, naming the field, its value and the rule."""
    precision = config["kv_cache_precision"]
    if precision not in KV_DTYPES or KV_DTYPES[precision].name != facts["kv_dtype"]:
        raise InvalidRequest(
            f"kv_cache_precision must be one of {', '.join(KV_DTYPES)} and that of the graph ({facts['kv_dtype']}) for "
            f"the onnxruntime engine, got {precision!r}"
        )
    if config["vocab_size"] != facts["vocab_size"]:
        raise InvalidRequest(f"vocab_size must be the graph's {facts['vocab_size']}, got {config['vocab_size']}")
    context = facts.get("max_position_embeddings", 0)
    if context and config["max_model_len"] > context:
        raise InvalidRequest(
            f"max_model_len must be at most the model's context {context}, got {config['max_model_len']}"
        )
    for name in config.get("properties", {}):
        if name not in PROPERTIES:
            raise InvalidRequest(f"properties.{name} must be one of {', '.join(PROPERTIES)} for the onnxruntime engine")


def open_session(model_dir: Path, properties: dict[str, Any]) -> ort.InferenceSession:
    """Load model.onnx with its weights; ReleaseMismatch names the file when ONNX Runtime cannot."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = properties.get("intra_op_num_threads", 0)
    options.enable_mem_pattern = False  # it would keep a pattern for every new shape
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", str(int(properties.get("allow_spinning", True)))
    )
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # activations stay as they are
    try:
        return ort.InferenceSession(model_dir / MODEL, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's exceptions share no base but Exception
        reason = str(error).splitlines()[0]
        raise ReleaseMismatch(f"{model_dir / MODEL} or its weights {WEIGHTS} cannot be loaded: {reason}") from None


def check_ports(session: ort.InferenceSession, facts: dict[str, Any], model_dir: Path) -> None:
    """Compare the graph's inputs and outputs with what graph.json promises; ReleaseMismatch names the first other."""
    kv_type = {"float32": "tensor(float)", "float16": "tensor(float16)"}[facts["kv_dtype"]]
    inputs: dict[str, tuple[str, list]] = {
        "input_ids": ("tensor(int64)", ["batch", "tokens"]),
        "write_index": ("tensor(int64)", ["batch"]),
        "logit_rows": ("tensor(int64)", ["rows"]),
    }
    outputs: dict[str, tuple[str, list]] = {"logits": ("tensor(float)", ["rows", facts["vocab_size"]])}
    for index, layer in enumerate(facts["layers"]):
        cache = (kv_type, ["batch", layer["kv_heads"], "cache_len", layer["head_size"]])
        inputs |= {f"past_key_{index}": cache, f"past_value_{index}": cache}
        outputs |= {f"present_key_{index}": cache, f"present_value_{index}": cache}
    for wanted, ports in ((inputs, session.get_inputs()), (outputs, session.get_outputs())):
        found = {port.name: (port.type, port.shape) for port in ports}
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise ReleaseMismatch(
                    f"{name} of {model_dir / MODEL} must be {wanted.get(name)}, as {FACTS} says, got {found.get(name)}"
                )


class OnnxRuntimeEngine(LinearEngine):
    """Engine protocol over a step graph on ONNX Runtime's CPU provider; `config` is the engine_config of decoder.json.

    Raises ReleaseMismatch when the files are not what graph.json says, InvalidRequest when `config` does not fit them.
    """

    def __init__(self, model_dir: Path, config: dict[str, Any]) -> None:
        spec = EngineSpec(**{name: config[name] for name in EngineSpec.__dataclass_fields__})
        facts = read_facts(Path(model_dir))
        check_config(facts, config)
        cache_len = cache_len_for(spec.max_model_len, NARROW_TOKENS)
        views = [FIRST_VIEW << power for power in range(32) if FIRST_VIEW << power < cache_len]
        limits = CallLimits(
            (*views, cache_len), MAX_TOKENS, spec.num_blocks, MAX_LOGIT_ROWS, NARROW_TOKENS, call_cost=CALL_COST
        )
        super().__init__(spec, limits)
        self._session = open_session(Path(model_dir), config.get("properties", {}))
        check_ports(self._session, facts, Path(model_dir))
        self._dtype = KV_DTYPES[config["kv_cache_precision"]]
        self._caches = self._allocate(facts["layers"], cache_len)
        self._logits = np.empty((1, spec.vocab_size), np.float32)
        self._bindings: dict[tuple[int, int, int], ort.IOBinding] = {}

    def _allocate(self, layers: Sequence[dict[str, int]], cache_len: int) -> list[CacheLayer]:
        """One allocation for all rows and layers, touched: memory that is not there is missed now, not by a request.

        Raises InvalidRequest when there is less memory than the rows need.
        """
        sizes = [self.spec.num_blocks * layer["kv_heads"] * cache_len * layer["head_size"] for layer in layers]
        step = ALIGNMENT // self._dtype.itemsize
        padded = [-(-size // step) * step for size in sizes]
        elements = 2 * sum(padded) + step
        row_bytes, free = elements * self._dtype.itemsize // self.spec.num_blocks, available_bytes()
        if row_bytes * self.spec.num_blocks > free:
            raise InvalidRequest(
                f"num_blocks must be at most {free // row_bytes}: a slot of {cache_len} positions takes "
                f"{row_bytes // MIB} MiB, and {free // MIB} MiB are free; got {self.spec.num_blocks}"
            )
        arena = np.empty(elements, self._dtype)
        arena.fill(0)
        begin = -arena.ctypes.data % ALIGNMENT // self._dtype.itemsize
        caches = []
        for index, (layer, size, stride) in enumerate(zip(layers, sizes, padded, strict=True)):
            for part in ("key", "value"):
                buffer = arena[begin : begin + size]
                caches.append(CacheLayer(f"{part}_{index}", layer["kv_heads"], layer["head_size"], buffer))
                begin += stride
        return caches

    def run(self, call: LinearCall) -> np.ndarray:
        """See LinearEngine.run. The logits are overwritten by the next run."""
        binding = self._binding(call)
        for name in ("input_ids", "write_index", "logit_rows"):
            array = getattr(call, name)
            binding.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)
        rows = len(call.logit_rows)
        if rows > len(self._logits):
            self._logits = np.empty((rows, self.spec.vocab_size), np.float32)
        logits = self._logits[:rows]
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # the runtime's exceptions share no base but Exception
            raise EngineFailure(f"onnxruntime could not compute the step: {str(error).splitlines()[0]}") from error
        return logits

    def _binding(self, call: LinearCall) -> ort.IOBinding:
        """The binding of the rows of `call`, past and present at the same addresses: those of the cache."""
        batch = len(call.write_index)
        key = call.first_row, batch, call.cache_len
        if key not in self._bindings:
            binding = self._session.io_binding()
            for cache in self._caches:
                rows = cache.rows(self.spec.num_blocks, call.cache_len)[call.first_row : call.first_row + batch]
                for bind, name in ((binding.bind_input, "past"), (binding.bind_output, "present")):
                    bind(f"{name}_{cache.name}", "cpu", 0, self._dtype.type, rows.shape, rows.ctypes.data)
            self._bindings[key] = binding
        return self._bindings[key]

    def copy_rows(self, source: int, destination: int, num_tokens: int) -> None:
        """See LinearEngine.copy_rows."""
        for cache in self._caches:
            rows = cache.rows(self.spec.num_blocks, self._view)
            rows[destination, :, :num_tokens] = rows[source, :, :num_tokens]

    def swap_rows(self, first: int, second: int, num_tokens: int) -> None:
        """See LinearEngine.swap_rows."""
        for cache in self._caches:
            rows = cache.rows(self.spec.num_blocks, self._view)
            kept = rows[first, :, :num_tokens].copy()
            rows[first, :, :num_tokens] = rows[second, :, :num_tokens]
            rows[second, :, :num_tokens] = kept

    def set_view(self, cache_len: int, lengths: Sequence[int]) -> None:
        """See LinearEngine.set_view. Rows move apart from the last one on, together from the first one on.

        So what is not moved yet is never overwritten: a row's place is behind its old one, or before it.
        """
        self._bindings.clear()
        order = range(self.spec.num_blocks) if cache_len < self._view else reversed(range(self.spec.num_blocks))
        order = [row for row in order if lengths[row]]
        for cache in self._caches:
            old = cache.rows(self.spec.num_blocks, self._view)
            new = cache.rows(self.spec.num_blocks, cache_len)
            heads = range(cache.kv_heads) if cache_len < self._view else range(cache.kv_heads - 1, -1, -1)
            for row in order:
                for head in heads:
                    new[row, head, : lengths[row]] = old[row, head, : lengths[row]]

    def close(self) -> None:
        """See Engine.close."""
        self._bindings.clear()
        del self._session, self._caches, self._logits

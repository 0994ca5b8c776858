"""The TensorRT engine: runs the calls of a linear KV cache on an NVIDIA GPU, through cuda.bindings, without torch.

The KV cache is allocated once, outside the engine; past and present of a call are bound to one address, as TensorRT's
KVCacheUpdate demands. One stream orders everything. Without a driver, loading ends before TensorRT is touched.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from tritonforge.engines.base import EngineSpec
from tritonforge.engines.linear import LinearEngine
from tritonforge.engines.linear_calls import LinearCall
from tritonforge.engines.tensorrt_device import Device, require_driver
from tritonforge.engines.tensorrt_identity import DECODE, ITEMSIZE, PREFILL, Identity
from tritonforge.engines.tensorrt_loader import (
    INPUTS,
    LOGITS,
    cache_names,
    import_flavour,
    open_engine,
    save_runtime_cache,
)
from tritonforge.engines.tensorrt_plan import DevicePlan, call_limits, most_logit_rows
from tritonforge.errors import EngineFailure

log = logging.getLogger(__name__)

MOST_GRAPHS = 256
"""CUDA graphs kept: one for each decode shape at each place of the cache that occurs. Others run without."""

Shape = tuple[int, int, int, int]
"""(first row, batch, tokens, rows) of a call: what decides its bindings."""


class TensorRTEngine(LinearEngine):
    """Engine protocol over a TensorRT engine file; `config` is the engine_config of decoder.json.

    Raises SetupError without driver, GPU or memory for the KV cache, ReleaseMismatch when the engine file is not for
    this GPU, this TensorRT or this configuration. `trt` and `cuda` stand in for the modules of those names in tests.
    """

    def __init__(self, folder: Path, config: dict[str, Any], *, trt: Any = None, cuda: Any = None) -> None:
        folder = Path(folder)
        if cuda is None:
            require_driver()
        identity = Identity.read(folder)
        identity.check_config(config)
        trt = trt or import_flavour(identity)
        self._device = device = Device(cuda)
        try:
            identity.check_device(device.name, device.compute_capability)
            plan = DevicePlan.of(identity, 0)
            identity.check_memory(device.memory()[0], plan.weight_bytes + plan.buffer_bytes)
            self._opened = open_engine(folder, identity, trt, device)
            work = self._opened.engine.device_memory_size_v2
            identity.check_memory(device.memory()[0], work + plan.buffer_bytes)
            self._allocate(identity, work)
        except BaseException:
            device.close()
            raise
        self._captures = identity.flavour == "tensorrt"
        self._bound: Shape | None = None
        self._profile = PREFILL  # a new context has profile 0
        self._graphs: dict[Shape, Any] = {}
        spec = EngineSpec(**{name: config[name] for name in EngineSpec.__dataclass_fields__})
        super().__init__(spec, call_limits(identity))

    def _allocate(self, identity: Identity, work: int) -> None:
        """The KV cache, the context's memory, and buffers for the largest call, on the device and page-locked here."""
        device, context = self._device, self._opened.context
        sizes = [size for size in identity.slot_bytes for _ in ("key", "value")]
        self._caches = [device.allocate(identity.slots * size) for size in sizes]
        self._slot_bytes = sizes
        self._heads = [layer.kv_heads for layer in identity.layers for _ in ("key", "value")]
        self._exchange = device.allocate(max(sizes))
        if work:
            context.set_device_memory(device.allocate(work), work)
        prefill, decode = identity.profiles
        ids = max(prefill.batch.most * prefill.tokens.most, decode.batch.most)
        rows = most_logit_rows(identity.profiles)
        counts = dict(zip(INPUTS, (ids, identity.slots, rows), strict=True))
        self._addresses = {name: device.allocate(8 * count) for name, count in counts.items()}
        self._addresses[LOGITS] = device.allocate(4 * rows * identity.vocab_size)
        self._staged = {name: device.pinned((count,), np.int64) for name, count in counts.items()}
        self._logits = device.pinned((rows, identity.vocab_size), np.float32)
        self._row_pitch = [identity.cache_len * layer.head_size for layer in identity.layers for _ in ("key", "value")]
        self._itemsize = ITEMSIZE[identity.kv_dtype]
        self._cache_len = identity.cache_len
        self._names = cache_names(identity)

    def run(self, call: LinearCall) -> np.ndarray:
        """See LinearEngine.run. The logits are overwritten by the next call."""
        batch, tokens = call.input_ids.shape
        rows = len(call.logit_rows)
        shape = (call.first_row, batch, tokens, rows)
        self._bind(shape)
        for name, values in zip(INPUTS, (call.input_ids, call.write_index, call.logit_rows), strict=True):
            staged = self._staged[name][: values.size]
            staged[:] = values.reshape(-1)
            self._device.to_device(self._addresses[name], staged)
        self._compute(shape)
        logits = self._logits[:rows]
        self._device.to_host(logits, self._addresses[LOGITS])
        self._device.wait()
        if self._captures and tokens == 1 and shape not in self._graphs and len(self._graphs) < MOST_GRAPHS:
            self._capture(shape)
        return logits

    def _bind(self, shape: Shape) -> None:
        """Bring the context to `shape`: profile, then shapes, then addresses, in the order that TensorRT asks for.

        setOptimizationProfileAsync "must be called before calling setInputShape() for all dynamic input tensors ...
        which in turn must be called before executeV2()/enqueueV3()" (NvInferRuntime.h), and invalidates their shapes.
        """
        if shape == self._bound:
            return
        first_row, batch, tokens, rows = shape
        opened, context = self._opened, self._opened.context
        profile = DECODE if tokens == 1 else PREFILL
        if not opened.identity.profiles[profile].holds(batch, tokens, rows):
            raise EngineFailure(f"a call must be within {opened.identity.profiles[profile]}, got {shape}")
        self._bound = None  # while it is neither the old nor the new shape
        if profile != self._profile:
            done = context.set_optimization_profile_async(profile, self._device.stream)
            self._require(done, f"profile {profile}")
            self._profile = profile
        shapes = dict(zip(INPUTS, ((batch, tokens), (batch,), (rows,)), strict=True))
        addresses = dict(self._addresses)
        for index, (past, present) in enumerate(self._names):
            layer = opened.identity.layers[index // 2]
            shapes[past] = (batch, layer.kv_heads, opened.identity.cache_len, layer.head_size)
            addresses[past] = addresses[present] = self._row_address(index, first_row)
        for name, size in shapes.items():
            self._require(context.set_input_shape(name, size), f"shape {size} of {name}")
        for name, address in addresses.items():
            self._require(context.set_tensor_address(name, address), f"address of {name}")
        missing = context.infer_shapes()
        self._require(not missing, f"call without {missing}")
        self._bound = shape

    def _row_address(self, cache: int, row: int) -> int:
        """Address of a row in one of the caches."""
        return self._caches[cache] + row * self._slot_bytes[cache]

    def _require(self, done: bool, what: str) -> None:
        if not done:
            raise EngineFailure(f"TensorRT did not take the {what}; its log says why")

    def _compute(self, shape: Shape) -> None:
        """Enqueue the call that is bound: its CUDA graph where there is one."""
        graph = self._graphs.get(shape)
        if graph is not None:
            self._device.launch(graph)
        else:
            self._enqueue()

    def _enqueue(self) -> None:
        self._require(self._opened.context.execute_async_v3(self._device.stream), "call")

    def _capture(self, shape: Shape) -> None:
        """Keep the decode call that was just computed as a CUDA graph.

        A shape must have been enqueued once before it is captured: TensorRT does deferred work in the first call. The
        graph holds addresses, so buffers never move.
        """
        try:
            self._graphs[shape] = self._device.capture(self._enqueue)
        except EngineFailure as error:
            self._captures = False
            log.warning("CUDA graphs are off: a decode call could not be captured (%s)", error)

    def copy_rows(self, source: int, destination: int, num_tokens: int) -> None:
        """See LinearEngine.copy_rows."""
        for cache in range(len(self._caches)):
            self._copy(cache, self._row_address(cache, destination), self._row_address(cache, source), num_tokens)

    def swap_rows(self, first: int, second: int, num_tokens: int) -> None:
        """See LinearEngine.swap_rows."""
        for cache in range(len(self._caches)):
            one, other = self._row_address(cache, first), self._row_address(cache, second)
            self._copy(cache, self._exchange, one, num_tokens)
            self._copy(cache, one, other, num_tokens)
            self._copy(cache, other, self._exchange, num_tokens)

    def _copy(self, cache: int, target: int, source: int, num_tokens: int) -> None:
        """Enqueue a copy of the first tokens of each KV head: heads are `pitch` bytes apart in a row."""
        pitch = self._row_pitch[cache] * self._itemsize
        self._device.copy(target, source, pitch, pitch // self._cache_len * num_tokens, self._heads[cache])

    def close(self) -> None:
        """See Engine.close. The context goes before the engine, the engine before the runtime."""
        self._device.wait()
        save_runtime_cache(self._opened, self._device.compute_capability)
        opened = self._opened
        opened.context = opened.config = opened.engine = opened.runtime = None
        del self._staged, self._logits
        self._device.close()

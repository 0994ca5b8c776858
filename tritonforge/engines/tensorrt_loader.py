"""Opens an engine file on a GPU: checks its identity, deserializes it, checks its tensors, makes its context.

The order matters: what can be refused without TensorRT is refused before it is imported, and its Runtime is created
last. Only the tensorrt engine calls this.
"""

import logging
import mmap
import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tritonforge.engines.tensorrt_device import Device
from tritonforge.engines.tensorrt_identity import ENGINE, FLAVOURS, Identity
from tritonforge.errors import EngineFailure, ReleaseMismatch

log = logging.getLogger(__name__)

WEIGHTS = "model.onnx"
"""The graph, with its weights beside it, that a weight-stripped engine takes its weights from."""

INPUTS = ("input_ids", "write_index", "logit_rows")
LOGITS = "logits"


@dataclass
class Opened:
    """A deserialized engine with its one context. `runtime` and `logger` must live as long as the engine does."""

    trt: Any
    identity: Identity
    runtime: Any
    engine: Any
    context: Any
    config: Any | None
    logger: Any


def cache_names(identity: Identity) -> list[tuple[str, str]]:
    """(input, output) names of all caches, key then value of each layer."""
    parts = [f"{part}_{index}" for index in range(len(identity.layers)) for part in ("key", "value")]
    return [(f"past_{part}", f"present_{part}") for part in parts]


def import_flavour(identity: Identity) -> Any:
    """The module that built the engine, in the same version; ReleaseMismatch otherwise."""
    identity.check_runtime([name for name in FLAVOURS if find_spec(name)])
    trt = import_module(identity.flavour)
    identity.check_runtime(FLAVOURS, trt.__version__)
    return trt


def open_engine(folder: Path, identity: Identity, trt: Any, device: Device) -> Opened:
    """Deserialize the engine of `folder` and make its context, with memory that we own."""
    messages: list[str] = []
    logger = make_logger(trt, messages)
    runtime = trt.Runtime(logger)
    with open(folder / ENGINE, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        why = messages[-1] if messages else "TensorRT gave no reason"
        raise ReleaseMismatch(f"{ENGINE} could not be read, it is corrupt or not an engine of this TensorRT: {why}")
    if identity.stripped:
        refit(trt, engine, folder / WEIGHTS, logger, messages)
    check_tensors(trt, engine, identity)
    config = runtime_config(trt, engine, folder, identity, device)
    strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    context = engine.create_execution_context(config if config is not None else strategy)
    if context is None:
        raise EngineFailure(f"TensorRT made no execution context: {messages[-1] if messages else 'no reason given'}")
    return Opened(trt, identity, runtime, engine, context, config, logger)


def make_logger(trt: Any, messages: list[str]) -> Any:
    """A TensorRT logger that passes warnings and errors to our log and collects errors in `messages`."""
    severity = trt.ILogger.Severity

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, level: Any, message: str) -> None:
            if level in (severity.INTERNAL_ERROR, severity.ERROR):
                messages.append(message.strip())
                log.error("TensorRT: %s", message)
            elif level == severity.WARNING:
                log.warning("TensorRT: %s", message)

    return Logger()


def refit(trt: Any, engine: Any, weights: Path, logger: Any, messages: list[str]) -> None:
    """Put the weights of an ONNX file into an engine that was built without them."""
    refitter = trt.Refitter(engine, logger)
    if not trt.OnnxParserRefitter(refitter, logger).refit_from_file(str(weights)) or not refitter.refit_cuda_engine():
        raise ReleaseMismatch(f"the engine did not take the weights of {weights.name}: {messages[-1:]}")


def check_tensors(trt: Any, engine: Any, identity: Identity) -> None:
    """ReleaseMismatch unless the engine has the step graph's inputs and outputs, and updates its caches in place.

    ICudaEngine::getAliasedInputTensor names the input whose memory an output must share.
    """
    caches = cache_names(identity)
    wanted = {*INPUTS, LOGITS, *(name for pair in caches for name in pair)}
    found = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    if found != wanted:
        raise ReleaseMismatch(f"the engine's tensors are not those of the step graph: {sorted(found ^ wanted)}")
    for name in sorted(found):
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise ReleaseMismatch(f"the engine wants {name} in host memory; it must be in device memory")
    for index, (past, present) in enumerate(caches):
        layer = identity.layers[index // 2]
        shape = (-1, layer.kv_heads, identity.cache_len, layer.head_size)
        if tuple(engine.get_tensor_shape(past)) != shape:
            raise ReleaseMismatch(f"{past} must be {shape}, the engine has {tuple(engine.get_tensor_shape(past))}")
        if engine.get_aliased_input_tensor(present) != past:
            raise ReleaseMismatch(f"{present} must share the memory of {past}: the engine does not update it in place")
    if engine.num_optimization_profiles != len(identity.profiles):
        raise ReleaseMismatch(
            f"the engine must have {len(identity.profiles)} profiles, it has {engine.num_optimization_profiles}"
        )


def runtime_config(trt: Any, engine: Any, folder: Path, identity: Identity, device: Device) -> Any | None:
    """TensorRT for RTX: kernels compiled at load come from a cache, and it captures CUDA graphs by itself.

    TensorRT itself needs neither: its kernels are in the engine, and the tensorrt engine captures graphs.
    """
    if identity.flavour != "tensorrt_rtx":
        return None
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    cache = config.create_runtime_cache()
    path = runtime_cache_path(identity, device.compute_capability)
    if path.is_file() and not cache.deserialize(path.read_bytes()):
        log.warning("the runtime cache %s does not fit and is made again", path)
    config.set_runtime_cache(cache)
    return config


def runtime_cache_path(identity: Identity, compute_capability: str) -> Path:
    """Where compiled kernels are kept: outside the release, which does not change."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tritonforge"
    shape = f"{len(identity.layers)}x{identity.slots}x{identity.cache_len}-{identity.engine_bytes}"
    return base / f"{identity.version}-sm{compute_capability}-{shape}.rtxcache"


def save_runtime_cache(opened: Opened, compute_capability: str) -> None:
    """Keep the kernels that were compiled while the engine ran; a folder that cannot be written is no failure."""
    if opened.config is None:
        return
    path = runtime_cache_path(opened.identity, compute_capability)
    partial = path.with_suffix(f".partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(memoryview(opened.config.get_runtime_cache().serialize()))
        os.replace(partial, path)
    except OSError as error:
        log.warning("the runtime cache %s could not be kept: %s", path, error)

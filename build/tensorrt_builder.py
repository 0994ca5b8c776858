"""Builds a TensorRT engine from an ONNX step graph, with `tensorrt` where it is, else with `tensorrt_rtx`.

The tensorrt target calls it. TensorRT for RTX builds without a GPU; its Runtime is never created here, which would end
a process without a driver. TensorRT itself builds for the GPU that it finds.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)
import onnx_graph

from tritonforge.engines.tensorrt_identity import FLAVOURS, Profile
from tritonforge.errors import EngineFailure, InvalidCheckpoint, InvalidRecipe, SetupError

LOG = "build.log"
INSPECTION = "inspection.json"
KV_UPDATE, ATTENTION = "KV_CACHE_UPDATE", "ATTENTION_INPUT"
"""Layer types of the network: TensorRT shows an attention as one input and one output layer."""
UPDATES_A_LAYER, ATTENTIONS_A_LAYER = 2, 1


@dataclass(frozen=True)
class Wanted:
    """What to build. `optimization_level` is TensorRT's, -1 leaves its default; `workspace_bytes` 0 likewise."""

    cache_len: int
    profiles: tuple[Profile, ...]
    compute_capabilities: tuple[str, ...]
    strip_weights: bool = False
    workspace_bytes: int = 0
    optimization_level: int = -1


@dataclass(frozen=True)
class Built:
    """A serialized engine; `layer_counts` counts the layers of the parsed network by type."""

    engine: Any
    flavour: str
    version: str
    layer_counts: dict[str, int]


def import_flavour() -> Any:
    """The TensorRT module to build with; SetupError when none is installed."""
    for name in FLAVOURS:
        if find_spec(name):
            return import_module(name)
    raise SetupError(
        "the tensorrt target needs tensorrt (NVIDIA's container has it) or tensorrt_rtx "
        "(pip install tensorrt-rtx-cu12, no GPU needed to build); neither is installed"
    )


def offered_capabilities(trt: Any) -> tuple[str, ...]:
    """Compute capabilities that the builder can be told to build for, "8.9" for SM89.

    Empty for TensorRT itself, which builds for the GPU that is there.
    """
    members = getattr(getattr(trt, "ComputeCapability", None), "__members__", {})
    numbers = sorted(int(name[2:]) for name in members if name.startswith("SM"))
    return tuple(f"{number // 10}.{number % 10}" for number in numbers)


def make_recorder(trt: Any, lines: list[str]) -> Any:
    """A TensorRT logger that keeps everything above VERBOSE in `lines`, with its severity."""
    verbose = trt.ILogger.Severity.VERBOSE

    class Recorder(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, level: Any, message: str) -> None:
            if level != verbose and not message.startswith("Input filename"):  # where it was built is no fact of it
                lines.append(f"{level.name}: {message.strip()}")

    return Recorder()


def with_static_cache(model: Any, cache_len: int) -> bytes:
    """The ONNX model, serialized, with `cache_len` in place of the symbol.

    TensorRT's KVCacheUpdate wants a static sequence length. Shapes that export noted for values inside the graph hold
    the symbol too; they are only hints, and left out.
    """
    for value in (*model.graph.input, *model.graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == "cache_len":
                dimension.dim_value = cache_len  # a oneof: sets the number, clears the symbol
    del model.graph.value_info[:]
    return model.SerializeToString()


def parse(trt: Any, builder: Any, logger: Any, folder: Path, cache_len: int) -> Any:
    """The network of the graph in `folder`; InvalidCheckpoint when it is no graph, InvalidRecipe when TensorRT takes
    it not."""
    import onnx
    from google.protobuf.message import DecodeError

    path = folder / onnx_graph.MODEL
    try:
        model = onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise InvalidCheckpoint(f"{path} cannot be read as an ONNX file: {error}") from None
    typed = trt.NetworkDefinitionCreationFlag.__members__.get("STRONGLY_TYPED")  # the only kind from TensorRT 11 on
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, logger)
    content = with_static_cache(model, cache_len)
    if not parser.parse(content, str(path)):
        reasons = [parser.get_error(index).desc().splitlines()[0] for index in range(parser.num_errors)]
        raise InvalidRecipe(f"TensorRT cannot take the graph in {folder}: {'; '.join(reasons) or 'no reason given'}")
    return network


def count_layers(network: Any) -> dict[str, int]:
    """How many layers of each type the network has, most frequent first."""
    counts = Counter(network.get_layer(index).type.name for index in range(network.num_layers))
    return dict(counts.most_common())


def check_layers(counts: dict[str, int], num_layers: int) -> None:
    """EngineFailure unless each layer of the model has its in-place KV updates and its one fused attention."""
    for kind, each in ((KV_UPDATE, UPDATES_A_LAYER), (ATTENTION, ATTENTIONS_A_LAYER)):
        found = counts.get(kind, 0)
        if found != each * num_layers:
            raise EngineFailure(
                f"the network must have {each * num_layers} layers {kind}, {each} for each of {num_layers} layers, "
                f"it has {found}: the graph does not update its KV cache in place"
            )


def add_profile(builder: Any, config: Any, network: Any, profile: Profile) -> None:
    """Add an optimization profile: caches have the profile's batch, their other dimensions are fixed."""
    own = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        rest = tuple(tensor.shape)[1:]
        shapes = []
        for name in ("least", "usual", "most"):
            batch, tokens, rows = (getattr(part, name) for part in (profile.batch, profile.tokens, profile.rows))
            own_shape = {"input_ids": (batch, tokens), "write_index": (batch,), "logit_rows": (rows,)}
            shapes.append(own_shape.get(tensor.name, (batch, *rest)))
        own.set_shape(tensor.name, *shapes)
    if config.add_optimization_profile(own) < 0:
        raise EngineFailure(f"TensorRT does not take the profile {profile}")


def configure(trt: Any, builder: Any, network: Any, wanted: Wanted) -> Any:
    """The builder configuration of `wanted`."""
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for profile in wanted.profiles:
        add_profile(builder, config, network, profile)
    # Context memory is ours, so that capturing CUDA graphs never meets an allocation.
    flags = ["REQUIRE_USER_ALLOCATION"]
    if wanted.strip_weights:
        flags += ["STRIP_PLAN", "REFIT_IDENTICAL"]
    for name in flags:
        if name in trt.BuilderFlag.__members__:
            config.set_flag(getattr(trt.BuilderFlag, name))
    if wanted.workspace_bytes:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, wanted.workspace_bytes)
    if wanted.optimization_level >= 0:
        config.builder_optimization_level = wanted.optimization_level
    if offered_capabilities(trt):
        config.num_compute_capabilities = len(wanted.compute_capabilities)
        for index, capability in enumerate(wanted.compute_capabilities):
            member = getattr(trt.ComputeCapability, "SM" + capability.replace(".", ""))
            config.set_compute_capability(member, index)
    return config


def reuse_timings(trt: Any, config: Any, folder: Path | None) -> Callable[[], None]:
    """Let the builder use timings of earlier builds in `folder`; the function that comes back keeps those of this one.

    TensorRT times kernels while it builds. For RTX there is nothing to time: kernels are made where the engine runs.
    """
    if folder is None or offered_capabilities(trt):
        return lambda: None
    path = folder / f"tensorrt-timing-{trt.__version__}.cache"
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    config.set_timing_cache(cache, ignore_mismatch=False)

    def keep() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(memoryview(config.get_timing_cache().serialize()))

    return keep


def build(folder: Path, wanted: Wanted, num_layers: int, out: Path, timings: Path | None = None) -> Built:
    """Build the graph in `folder`; writes build.log and inspection.json to `out`.

    `timings` is the folder in which timings of kernels are kept from build to build, where the flavour takes any.
    Raises InvalidRecipe when the graph cannot be taken, EngineFailure when no engine comes out.
    """
    trt = import_flavour()
    lines: list[str] = []
    logger = make_recorder(trt, lines)
    builder = trt.Builder(logger)
    try:
        network = parse(trt, builder, logger, folder, wanted.cache_len)
        counts = count_layers(network)
        check_layers(counts, num_layers)
        config = configure(trt, builder, network, wanted)
        keep_timings = reuse_timings(trt, config, timings)
        engine = builder.build_serialized_network(network, config)
    finally:
        (out / LOG).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if engine is None:
        errors = [line.split(": ", 1)[1] for line in lines if line.startswith(("ERROR", "INTERNAL_ERROR"))]
        raise EngineFailure(
            f"{trt.__name__} {trt.__version__} built no engine: {errors[-1] if errors else 'no reason'}"
        )
    inspection = {"network_layers": counts, "tensors": tensors(network)}
    (out / INSPECTION).write_text(json.dumps(inspection, indent=2) + "\n", encoding="utf-8")
    keep_timings()
    return Built(engine, trt.__name__, trt.__version__, counts)


def tensors(network: Any) -> dict[str, list]:
    """Type and shape of the network's inputs and outputs by name; -1 is a dimension that calls choose."""
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    return {tensor.name: [tensor.dtype.name, list(tensor.shape)] for tensor in (*inputs, *outputs)}

"""Compile target tensorrt: checks a recipe for TensorRT, builds the engine, plans what it takes on the device.

The engine is built here and runs on a GPU; quality is measured on the very graph that it was built from, through ONNX
Runtime on the CPU. The compile stage is the only caller.
"""

import os
from pathlib import Path
from typing import Any

import checkout
import onnx_graph
import tensorrt_builder
from recipe import Recipe
from tensorrt_recipe import KV_DTYPES, check_recipe, check_tools  # noqa: F401  (the checks are the target's)

from tritonforge.engines.tensorrt_identity import ALIGNMENT, ENGINE, Identity, Layer, Profile, slot_bytes
from tritonforge.engines.tensorrt_plan import WORKSPACE_MIB, DevicePlan, cache_len, profiles
from tritonforge.errors import InvalidRecipe

NAME = "tensorrt"
PACKAGES = ("tensorrt", "tensorrt-rtx-cu12", "tensorrt-rtx-cu13", "onnx")
SOURCES = (
    "build/target_tensorrt.py",
    "build/tensorrt_builder.py",
    "build/tensorrt_recipe.py",
    "build/onnx_graph.py",
    "tritonforge/engines/tensorrt.py",
    "tritonforge/engines/tensorrt_device.py",
    "tritonforge/engines/tensorrt_identity.py",
    "tritonforge/engines/tensorrt_loader.py",
    "tritonforge/engines/tensorrt_plan.py",
    "tritonforge/engines/linear.py",
    "tritonforge/engines/linear_calls.py",
    "tritonforge/engines/linear_rows.py",
    "tritonforge/engines/base.py",
)
WEIGHTS = ENGINE
SPARE_BLOCKS = 0

SOFTCAPPED = ("gemma2",)
"""Architectures whose attention is softcapped: TensorRT's ONNX parser says that it does not support it."""


def check_model(recipe: Recipe, model: dict[str, Any]) -> None:
    """InvalidRecipe for a model that TensorRT cannot take, or whose KV cache alone is larger than device_memory_mib.

    The whole plan is checked when the engine is built.
    """
    if model.get("model_type") in SOFTCAPPED:
        raise InvalidRecipe(
            f"compile.target must not be tensorrt for model_type {model['model_type']}: it caps attention scores "
            "(softcap), which TensorRT's attention does not do; the onnxruntime target does"
        )
    layers = (Layer(model["num_kv_heads"], model["head_size"]),) * model["num_layers"]
    _check_plan(recipe, DevicePlan(0, _kv_bytes(recipe, layers), 0, 0))


def _check_plan(recipe: Recipe, plan: DevicePlan) -> None:
    memory_mib = recipe.compile.properties.get("device_memory_mib")
    if memory_mib is not None and plan.total_bytes > memory_mib * 2**20:
        raise InvalidRecipe(
            f"compile.properties.device_memory_mib must be at least {-(-plan.total_bytes // 2**20)}, got {memory_mib}: "
            f"{plan}; lower kv_cache.slots ({recipe.kv_cache.slots}) or limits.max_model_len "
            f"({recipe.limits.max_model_len})"
        )


def _kv_bytes(recipe: Recipe, layers: tuple[Layer, ...]) -> int:
    length, dtype = own_cache_len(recipe), KV_DTYPES[recipe.kv_cache.precision]
    return 2 * recipe.kv_cache.slots * sum(slot_bytes(layer, length, dtype) for layer in layers)


def workspace_bytes(recipe: Recipe) -> int:
    """The memory for activations: a limit for the builder, and a share of the plan."""
    return recipe.compile.properties.get("workspace_mib", WORKSPACE_MIB) * 2**20


def own_cache_len(recipe: Recipe) -> int:
    """Tokens that a slot has room for."""
    return cache_len(recipe.limits.max_model_len)


def own_profiles(recipe: Recipe) -> tuple[Profile, Profile]:
    """The prefill and the decode profile of a recipe."""
    limits = recipe.limits
    return profiles(recipe.kv_cache.slots, limits.max_model_len, limits.max_num_batched_tokens)


def estimate_bytes_per_block(recipe: Recipe, model: dict[str, Any]) -> int:
    """Bytes of one slot over all layers, before anything is built."""
    layers = (Layer(model["num_kv_heads"], model["head_size"]),) * model["num_layers"]
    return _kv_bytes(recipe, layers) // recipe.kv_cache.slots


def place(quantized: Path, engine_dir: Path, recipe: Recipe) -> None:
    """Build the engine of the quantized graph into `engine_dir`, with its identity, log and inspection."""
    graph = onnx_graph.Graph.read(quantized)
    layers = tuple(Layer(layer.kv_heads, layer.head_size) for layer in graph.layers)
    length = own_cache_len(recipe)
    _check_graph(recipe, graph, layers, length)
    weight_bytes = (quantized / onnx_graph.DATA).stat().st_size
    properties = recipe.compile.properties
    stripped = properties.get("strip_weights", False)
    wanted = tensorrt_builder.Wanted(
        cache_len=length,
        profiles=own_profiles(recipe),
        compute_capabilities=tuple(recipe.compile.compute_capabilities),
        strip_weights=stripped,
        workspace_bytes=workspace_bytes(recipe),
        optimization_level=properties.get("optimization_level", -1),
    )
    engine_dir.mkdir(parents=True)
    built = tensorrt_builder.build(quantized, wanted, graph.num_layers, engine_dir, checkout.ROOT / "artifacts")
    _write(engine_dir / ENGINE, built.engine)
    if stripped:
        _place_weights(quantized, engine_dir, length)
    identity = Identity(
        flavour=built.flavour,
        version=built.version,
        compute_capabilities=wanted.compute_capabilities,
        vocab_size=graph.vocab_size,
        slots=recipe.kv_cache.slots,
        max_model_len=recipe.limits.max_model_len,
        cache_len=length,
        kv_dtype=graph.kv_dtype,
        layers=layers,
        profiles=wanted.profiles,
        stripped=stripped,
        layer_counts=built.layer_counts,
        engine_bytes=0,
        weight_bytes=weight_bytes,
    )
    identity.write(engine_dir)
    _check_plan(recipe, DevicePlan.of(Identity.read(engine_dir), workspace_bytes(recipe)))


def _check_graph(recipe: Recipe, graph: onnx_graph.Graph, layers: tuple[Layer, ...], length: int) -> None:
    dtype = KV_DTYPES[recipe.kv_cache.precision]
    if graph.kv_dtype != dtype:
        raise InvalidRecipe(f"kv_cache.precision must be that of the graph ({graph.kv_dtype}), got {dtype}")
    for index, layer in enumerate(layers):
        size = slot_bytes(layer, length, dtype)
        if size % ALIGNMENT:
            raise InvalidRecipe(
                f"a slot of layer {index} must take a multiple of {ALIGNMENT} bytes, as TensorRT wants addresses; "
                f"{layer} with {length} tokens takes {size}"
            )


def _place_weights(quantized: Path, engine_dir: Path, length: int) -> None:
    """The graph with its weights, beside an engine that was built without them."""
    import onnx

    model = onnx.load(quantized / onnx_graph.MODEL, load_external_data=False)
    _write(engine_dir / onnx_graph.MODEL, tensorrt_builder.with_static_cache(model, length))
    os.link(quantized / onnx_graph.DATA, engine_dir / onnx_graph.DATA)


def _write(path: Path, content: Any) -> None:
    with open(path, "wb") as file:
        file.write(memoryview(content))


def bytes_per_block(engine_dir: Path, recipe: Recipe) -> int:
    """Bytes of one slot over all layers, as built."""
    identity = Identity.read(engine_dir)
    return identity.kv_bytes // identity.slots


def measured_steps(recipe: Recipe) -> tuple[int, ...]:
    """Tokens in a step in which quality is measured: the graph computes all steps alike."""
    return (recipe.limits.max_num_batched_tokens,)


def plan_memory(recipe: Recipe, engine_dir: Path) -> dict[str, int]:
    """What the engine takes on its device, computed: no GPU is needed to say it. Keys as engine_memory.measure has."""
    plan = DevicePlan.of(Identity.read(engine_dir), workspace_bytes(recipe))
    loaded = plan.weight_bytes + plan.kv_bytes + plan.buffer_bytes
    return {
        "num_blocks": recipe.kv_cache.slots,
        "load_peak_bytes": plan.weight_bytes,
        "loaded_bytes": loaded,
        "step_bytes": plan.workspace_bytes,
    }


def open_measured(quantized: Path, engine_dir: Path, engine_config: dict[str, Any]) -> Any:
    """The engine that quality is measured with: ONNX Runtime on the quantized graph, on the CPU.

    Its CPU provider has no attention in bfloat16: such an engine measures itself, on the GPU that check_tools wants.
    """
    if engine_config["kv_cache_precision"] == "bf16":
        return open_engine(engine_dir, engine_config)
    from tritonforge.engines.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine(quantized, {**engine_config, "properties": {}})


def open_engine(engine_dir: Path, engine_config: dict[str, Any]) -> Any:
    """The engine that the decoder will run; it needs a GPU."""
    from tritonforge.engines.tensorrt import TensorRTEngine

    return TensorRTEngine(engine_dir, engine_config)

"""Compile target onnxruntime: the ONNX step graph on a CPU, the very file that TensorRT compiles for a GPU.

What is stored is the quantized graph itself: ONNX Runtime prepares it when the decoder loads it. The compile stage is
the only caller.
"""

import shutil
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)
import onnx_graph
from recipe import Recipe
from recipe_fields import check_properties

from tritonforge.errors import InvalidCheckpoint, InvalidRecipe

NAME = "onnxruntime"
PACKAGES = ("onnxruntime",)
SOURCES = (
    "build/target_onnxruntime.py",
    "build/onnx_graph.py",
    "tritonforge/engines/onnxruntime.py",
    "tritonforge/engines/linear.py",
    "tritonforge/engines/linear_calls.py",
    "tritonforge/engines/linear_rows.py",
    "tritonforge/engines/base.py",
)
WEIGHTS = onnx_graph.DATA
SPARE_BLOCKS = 0

KV_CACHE = {"f32": ("float32", 4), "f16": ("float16", 2)}
"""KV precisions that ONNX Runtime's CPU provider has attention kernels for: element type and its bytes."""
WEIGHT_PRECISIONS = ("fp32", "fp16", "int8", "w8a8", "int4")
PROPERTIES = {"intra_op_num_threads": range(0, 4097), "allow_spinning": (True, False)}
"""The engine's properties that a recipe may set, with their values."""


def check_recipe(recipe: Recipe) -> None:
    """Refuse what ONNX Runtime has no kernel for on a CPU, and properties that the engine does not take."""
    for label, value, known in (
        ("weights.precision", recipe.weights.precision, WEIGHT_PRECISIONS),
        ("kv_cache.precision", recipe.kv_cache.precision, tuple(KV_CACHE)),
    ):
        if value not in known:
            raise InvalidRecipe(f"{label} must be one of {', '.join(known)} for the onnxruntime target, got {value!r}")
    for name in ("prefill_properties", "compute_capabilities"):
        if getattr(recipe.compile, name):
            raise InvalidRecipe(f"compile.{name} must not be given for the onnxruntime target")
    check_properties("compile.properties", recipe.compile.properties, PROPERTIES)


def check_model(_recipe: Recipe, _model: dict[str, Any]) -> None:
    """Nothing more to refuse: what a model needs is in its graph."""


def measured_steps(recipe: Recipe) -> tuple[int, ...]:
    """Tokens in a step, for each way in which the engine computes one: there is one."""
    return (recipe.limits.max_num_batched_tokens,)


def cache_len(recipe: Recipe) -> int:
    """Positions of one slot, with room for padding."""
    from tritonforge.engines.linear import cache_len_for
    from tritonforge.engines.onnxruntime import NARROW_TOKENS

    return cache_len_for(recipe.limits.max_model_len, NARROW_TOKENS)


def estimate_bytes_per_block(recipe: Recipe, model: dict[str, Any]) -> int:
    """Bytes of one slot over all layers, before anything is made."""
    values = 2 * model["num_layers"] * model["num_kv_heads"] * model["head_size"]
    return values * cache_len(recipe) * KV_CACHE[recipe.kv_cache.precision][1]


def place(quantized: Path, engine_dir: Path, recipe: Recipe) -> None:
    """Put the files that the engine reads into `engine_dir`; InvalidCheckpoint when their KV cache is another."""
    found, wanted = onnx_graph.Graph.read(quantized).kv_dtype, KV_CACHE[recipe.kv_cache.precision][0]
    if found != wanted:
        raise InvalidCheckpoint(f"the graph in {quantized} has a KV cache in {found}, the recipe wants {wanted}")
    engine_dir.mkdir(parents=True)
    for name in onnx_graph.FILES:
        shutil.copyfile(quantized / name, engine_dir / name)


def bytes_per_block(engine_dir: Path, recipe: Recipe) -> int:
    """Bytes of one slot over all layers."""
    itemsize = KV_CACHE[recipe.kv_cache.precision][1]
    return onnx_graph.Graph.read(engine_dir).cache_bytes_per_token(itemsize) * cache_len(recipe)


def import_engine() -> None:
    """Import what the engine needs, so that its memory is not counted as the engine's."""
    from tritonforge.engines import onnxruntime  # noqa: F401


def open_engine(engine_dir: Path, engine_config: dict[str, Any]) -> Any:
    """The engine that the decoder will run."""
    from tritonforge.engines.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine(engine_dir, engine_config)

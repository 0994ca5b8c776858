"""Compile target openvino: checks a recipe for the CPU engine, compiles once, and counts the KV blocks that fit.

What is stored is the quantized model itself: OpenVINO compiles it when the decoder loads it. The compile stage is the
only caller; nothing else knows how targets differ.
"""

import shutil
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)
from recipe import Recipe
from recipe_fields import check_properties

from tritonforge.errors import InvalidRecipe

NAME = "openvino"
PACKAGES = ("openvino",)
SOURCES = (
    "build/target_openvino.py",
    "tritonforge/engines/openvino.py",
    "tritonforge/engines/base.py",
    "tritonforge/memory/plan.py",
    "tritonforge/memory/available.py",
)
WEIGHTS = "openvino_model.bin"
FILES = ("openvino_model.xml", WEIGHTS)
BLOCK_SIZE = 32
SPARE_BLOCKS = 1
"""KV blocks that the engine keeps for padding, beyond those that hold sequences; a test holds that it is so."""

PROPERTIES = {
    "INFERENCE_PRECISION_HINT": ("f32", "bf16", "f16"),
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": range(0, 1 << 32),
    "PERFORMANCE_HINT": ("LATENCY", "THROUGHPUT"),
    "INFERENCE_NUM_THREADS": range(0, 4097),
    "KEY_CACHE_GROUP_SIZE": range(0, 1 << 32),
    "VALUE_CACHE_GROUP_SIZE": range(0, 1 << 32),
    "ENABLE_CPU_PINNING": (True, False),
    "ENABLE_HYPER_THREADING": (True, False),
}
"""OpenVINO's own properties that a recipe may set, with their values."""


def check_recipe(recipe: Recipe) -> None:
    """Refuse properties that the engine does not take, and a block size its kernel does not have."""
    if recipe.kv_cache.block_size != BLOCK_SIZE:
        raise InvalidRecipe(
            f"kv_cache.block_size must be {BLOCK_SIZE} for the openvino target, got {recipe.kv_cache.block_size}"
        )
    for key in ("properties", "prefill_properties"):
        check_properties(f"compile.{key}", getattr(recipe.compile, key), PROPERTIES)


def check_model(recipe: Recipe, model: dict[str, Any]) -> None:
    """Refuse a context that is longer than the window of a model that does not look back on all tokens."""
    window = model.get("sliding_window", 0)
    if window and recipe.limits.max_model_len > window:
        raise InvalidRecipe(
            f"limits.max_model_len must be at most the model's sliding_window ({window}), "
            f"got {recipe.limits.max_model_len}: the openvino engine keeps and attends to all tokens"
        )


def measured_steps(recipe: Recipe) -> tuple[int, ...]:
    """Tokens in a step, for each way in which the engine computes one: quality is measured for all of them."""
    from tritonforge.engines.openvino import DECODE_MULTIPLE, PREFILL_MIN_TOKENS

    most = recipe.limits.max_num_batched_tokens
    if recipe.compile.prefill_properties and most >= PREFILL_MIN_TOKENS:
        return (PREFILL_MIN_TOKENS - DECODE_MULTIPLE, most)
    return (most,)


def estimate_bytes_per_block(recipe: Recipe, model: dict[str, Any]) -> int:
    """Bytes of one KV block over all layers, before anything is compiled.

    An 8-bit cache keeps a float32 scale and zero point for each key channel of a block and for each value row.
    """
    size, block = model["head_size"], recipe.kv_cache.block_size
    if recipe.kv_cache.precision == "u8":
        head = (block + 8) * size + block * (size + 8)
    else:
        head = 2 * block * size * (4 if recipe.kv_cache.precision == "f32" else 2)
    return model["num_layers"] * model["num_kv_heads"] * head


def place(quantized: Path, engine_dir: Path, _recipe: Recipe) -> None:
    """Put the files that the engine reads into `engine_dir`."""
    engine_dir.mkdir(parents=True)
    for name in FILES:
        shutil.copyfile(quantized / name, engine_dir / name)


def bytes_per_block(engine_dir: Path, recipe: Recipe) -> int:
    """Bytes of one KV block as compiled, over all layers."""
    from tritonforge.engines import openvino

    model = openvino.read_paged_model(engine_dir)
    compiled = openvino.compile_paged_model(model, recipe.kv_cache.precision, recipe.compile.properties)
    return openvino.bytes_per_block(compiled)


def import_engine() -> None:
    """Import what the engine needs, so that its memory is not counted as the engine's."""
    from tritonforge.engines import openvino  # noqa: F401


def open_engine(engine_dir: Path, engine_config: dict[str, Any]) -> Any:
    """The engine that the decoder will run."""
    from tritonforge.engines.openvino import OpenVINOEngine

    return OpenVINOEngine(engine_dir, engine_config)

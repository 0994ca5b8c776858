"""Stage compile: the quantized model becomes an engine with its decoder.json, tried out and measured.

    python build/compile.py --recipe build/recipes/smollm2-135m-int8.toml --export DIR --quantize DIR --out DIR

Targets differ here and nowhere else: a target module checks the recipe, places the engine's files and opens the engine.
One whose engine needs a device that may not be here also has `open_measured`, an engine of the same model to measure
quality with, `plan_memory`, which computes what cannot be measured, and `check_tools`.
"""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import chain
import checkout  # noqa: F401  (puts the repository root on sys.path)
import engine_memory
import numpy as np
import quality
import quantize
import stage
from recipe import AUTO, Recipe
from reference import REFERENCE

from tritonforge.engines.base import Engine, SequenceStep
from tritonforge.errors import EngineFailure, InvalidRecipe

ENGINE = "engine"
CONFIG = "decoder.json"


def target_of(recipe: Recipe) -> ModuleType:
    """The module of the recipe's target."""
    return import_module(f"target_{recipe.compile.target}")


def plan_stage(exported: stage.Done, quantized: stage.Done, recipe: Recipe) -> stage.Stage:
    """The compilation of one quantized model; the export gives the reference that it is measured against."""
    target = target_of(recipe)
    return stage.Stage(
        name="compile",
        makes=f"{target.NAME} engine, measured",
        inputs={"export": exported.digest, "quantize": quantized.digest},
        settings=settings(recipe, exported.measurements["model"]),
        packages=("python", "numpy", *target.PACKAGES),
        sources=("build/compile.py", "build/engine_memory.py", "build/quality.py", *target.SOURCES),
    )


def settings(recipe: Recipe, model: dict[str, Any]) -> dict[str, Any]:
    """What decides the outcome besides files: sections of the recipe, and the facts of the model that become settings.

    The facts count here because another checkpoint can export the same files, with other stop tokens for instance.
    """
    values = recipe.as_dict()
    return {**{name: values[name] for name in ("kv_cache", "limits", "compile", "quality")}, "model": model}


def check_fits(recipe: Recipe, model: dict[str, Any], per_block: int) -> int:
    """The number of KV blocks that the memory budget holds; InvalidRecipe when the recipe does not fit the model.

    When the budget is what is free at load, the number is the most that the limits can use. A slot is a block.
    `model` holds the facts of the checkpoint, `per_block` the bytes of one block over all layers.
    """
    limits, cache = recipe.limits, recipe.kv_cache
    if limits.max_model_len > model["max_position_embeddings"]:
        raise InvalidRecipe(
            f"limits.max_model_len must be at most the model's max_position_embeddings "
            f"({model['max_position_embeddings']}), got {limits.max_model_len}"
        )
    if recipe.is_linear:
        return cache.slots
    spare = target_of(recipe).SPARE_BLOCKS
    needed = -(-limits.max_model_len // cache.block_size)
    if cache.memory_mib == AUTO:
        return limits.max_num_seqs * needed
    blocks = cache.memory_mib * 2**20 // per_block - spare
    if blocks < needed:
        least = -(-(needed + spare) * per_block // 2**20)
        raise InvalidRecipe(
            f"kv_cache.memory_mib must be at least {least} for one sequence of max_model_len "
            f"{limits.max_model_len} ({model['num_layers']} layers, {model['num_kv_heads']} KV heads of size "
            f"{model['head_size']}, {cache.precision}: {per_block} bytes a block), got {cache.memory_mib}"
        )
    return blocks


def check_recipe(recipe: Recipe, model: dict[str, Any]) -> None:
    """Everything that can be refused before work starts."""
    target = target_of(recipe)
    target.check_recipe(recipe)
    target.check_model(recipe, model)
    check_fits(recipe, model, target.estimate_bytes_per_block(recipe, model))


def check_tools(recipe: Recipe) -> None:
    """Refuse a recipe whose target's tools are not installed or cannot build what it wants here: SetupError."""
    target = target_of(recipe)
    if hasattr(target, "check_tools"):
        target.check_tools(recipe)


def compile_model(
    exported: stage.Done, quantized: stage.Done, recipe: Recipe, out: Path, *, force: bool = False
) -> stage.Done:
    """Make `out` (engine folder and decoder.json); the measurements hold quality and the size of the KV cache.

    Where steps of different sizes are computed differently, quality is the worst of them.
    Raises ReleaseMismatch when the quantized model was not made from this export as the recipe says.
    """
    chain.check_inputs(quantized, {"export": exported})
    chain.check_settings(quantized, quantize.settings(recipe), recipe.name)
    model = exported.measurements["model"]
    check_recipe(recipe, model)
    check_tools(recipe)

    def make(folder: Path) -> dict[str, Any]:
        target = target_of(recipe)
        engine_dir = folder / ENGINE
        target.place(quantized.folder, engine_dir, recipe)
        per_block = target.bytes_per_block(engine_dir, recipe)
        blocks = check_fits(recipe, model, per_block)
        config = decoder_config(recipe, model, blocks)
        if hasattr(target, "open_measured"):
            engine = target.open_measured(quantized.folder, engine_dir, config["engine_config"])
        else:
            engine = target.open_engine(engine_dir, config["engine_config"])
        report = measure(engine, exported.folder / REFERENCE, target.measured_steps(recipe))
        quality.check(report, recipe.quality)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if hasattr(target, "plan_memory"):
            measured = target.plan_memory(recipe, engine_dir)
        else:
            measured = engine_memory.measure(recipe.compile.target, engine_dir, config)
        return {"quality": report, **memory(recipe, engine_dir, per_block, blocks, measured)}

    return stage.run_stage(plan_stage(exported, quantized, recipe), out, make, force=force)


def measure(engine: Engine, reference: Path, steps: tuple[int, ...]) -> dict[str, Any]:
    """Try an engine out and measure its quality in steps of so many tokens each: the worst report. Closes it."""
    try:
        smoke(engine)
        reports = [quality.measure(engine, reference, step_tokens) for step_tokens in steps]
    finally:
        engine.close()
    return max(reports, key=lambda one: one["mean_kl"])


def memory(
    recipe: Recipe, engine_dir: Path, per_block: int, blocks: int, measured: dict[str, int]
) -> dict[str, dict[str, Any]]:
    """The KV cache's shape, and what else the engine takes, in bytes.

    weight: the weights file. runtime: what else the open engine holds (other layouts of the weights, graphs).
    step: what steps add. load_peak: the most while it opens, before its KV cache is there.
    """
    target = target_of(recipe)
    weights = (engine_dir / target.WEIGHTS).stat().st_size
    cache = (measured["num_blocks"] + target.SPARE_BLOCKS) * per_block
    return {
        "kv_cache": {
            "bytes_per_block": per_block,
            "num_blocks": blocks,
            "spare_blocks": target.SPARE_BLOCKS,
            "bytes": (blocks + target.SPARE_BLOCKS) * per_block,
            "fit_memory": recipe.kv_cache.memory_mib == AUTO,
        },
        "memory": {
            "weight_bytes": weights,
            "runtime_bytes": measured["loaded_bytes"] - cache - weights,
            "step_bytes": measured["step_bytes"],
            "load_peak_bytes": measured["load_peak_bytes"],
        },
    }


def decoder_config(recipe: Recipe, model: dict[str, Any], blocks: int) -> dict[str, Any]:
    """decoder.json: all that the decoder needs to know besides its files."""
    limits, cache = recipe.limits, recipe.kv_cache
    more = {"fit_memory": {"reserve_mib": cache.reserve_mib}} if cache.memory_mib == AUTO else {}
    if recipe.is_linear:
        more["max_num_batched_tokens"] = limits.max_num_batched_tokens
    return {
        "engine": recipe.compile.target,
        "engine_config": {
            "max_model_len": limits.max_model_len,
            "block_size": cache.block_size,
            "num_blocks": blocks,
            "vocab_size": model["vocab_size"],
            "kv_cache_precision": cache.precision,
            "properties": recipe.compile.properties,
            "prefill_properties": recipe.compile.prefill_properties,
            **more,
        },
        "scheduler": {
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_waiting": limits.max_waiting,
            "max_waiting_tokens": limits.max_waiting_tokens,
            "stream_interval_ms": limits.stream_interval_ms,
        },
        "stop_token_ids": list(model["stop_token_ids"]),
    }


def smoke(engine: Engine) -> None:
    """One step of two sequences, where the KV cache holds two: finite logits of the right shape come out."""
    sequences = [SequenceStep([0, 1, 2], 0, [0]), SequenceStep([3], 0, [1])][: engine.spec.num_blocks]
    logits = engine.step(sequences)
    shape = (len(sequences), engine.spec.vocab_size)
    if logits.shape != shape or not np.isfinite(logits).all():
        raise EngineFailure(f"the compiled model must give finite logits {list(shape)}, got {list(logits.shape)}")


def main() -> None:
    options = stage.arguments(__doc__.splitlines()[0], "export", "quantize").parse_args()
    exported, quantized = stage.open_input(options.export, "export"), stage.open_input(options.quantize, "quantize")
    compile_model(exported, quantized, Recipe.load(options.recipe), options.out, force=options.force)


if __name__ == "__main__":
    stage.script(main)

"""Stage quantize: weights of the float32 model are stored in fewer bits.

    python build/quantize.py --recipe build/recipes/smollm2-135m-int8.toml --export DIR --out DIR

How depends on the format of the model: quantize_openvino.py and quantize_onnx.py do it; this module dispatches, and
refuses a model that did not get as small as the recipe's precision promises.
"""

import shutil
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)
import stage
import texts
from recipe import Recipe

from tritonforge.errors import InvalidCheckpoint, ReleaseMismatch

OPENVINO_LARGEST = {"bf16": 0.55, "int8": 0.32, "int4": 0.26}
ONNX_LARGEST = {"fp32": 1.0, "fp16": 0.55, "bf16": 0.55, "int8": 0.4, "w8a8": 0.4, "fp8": 0.4, "int4": 0.3}
FLOAT32_LARGEST = {"fp32": 1.0, "fp16": 0.55, "bf16": 0.55, "int8": 0.45, "w8a8": 0.45, "fp8": 0.45, "int4": 0.36}
"""The largest part of the float32 size that the weights may keep; more means that a quantizer left them alone.

The head of an ONNX graph, often a fifth of a small model, stays in the precision of the KV cache: float32 at worst.
"""
CALIBRATED = {"openvino": ("int4",), "onnx": ("int4", "fp8", "w8a8")}
"""Precisions whose quantizers may read the calibration texts."""
PACKAGES = {"openvino": ("openvino", "nncf", "tokenizers"), "onnx": ("numpy", "onnx", "onnx-ir", "tokenizers")}
SOURCES = {
    "openvino": ("build/quantize.py", "build/quantize_openvino.py", "build/grid.py", "build/ir.py", "build/texts.py"),
    "onnx": ("build/quantize.py", "build/onnx_graph.py", "build/texts.py"),
}


def plan_stage(exported: stage.Done, recipe: Recipe) -> stage.Stage:
    """The quantization of one export; calibration texts are an input only where they are read."""
    inputs, packages, sources = {"export": exported.digest}, PACKAGES[recipe.format], SOURCES[recipe.format]
    if recipe.weights.precision in CALIBRATED[recipe.format]:
        inputs["calibration"] = texts.digest(texts.CALIBRATION)
    if converts(recipe):
        import quantize_onnx

        packages, sources = packages + quantize_onnx.PACKAGES, sources + quantize_onnx.SOURCES
    return stage.Stage(
        name="quantize",
        makes=f"{recipe.weights.precision} model",
        inputs=inputs,
        settings=settings(recipe),
        packages=("python", *packages),
        sources=sources,
    )


def settings(recipe: Recipe) -> dict[str, Any]:
    """What of the recipe decides the outcome for its format and precision."""
    weights = recipe.weights
    if recipe.format == "onnx":
        used = ("method", "group_size") if weights.precision != "fp32" else ()
        kept = {"format": "onnx", "kv_precision": recipe.kv_cache.precision}
    else:
        used = {"bf16": (), "int8": ("symmetric",)}.get(
            weights.precision, ("exact_grid", "symmetric", "group_size", "int4_ratio", "awq", "scale_estimation")
        )
        kept = {}
    return {"precision": weights.precision, **kept, **{name: getattr(weights, name) for name in used}}


def converts(recipe: Recipe) -> bool:
    """Whether an ONNX graph has to be changed: the exported one is in float32 throughout."""
    return recipe.format == "onnx" and (recipe.weights.precision, recipe.kv_cache.precision) != ("fp32", "f32")


def quantize(exported: stage.Done, recipe: Recipe, out: Path, *, force: bool = False) -> stage.Done:
    """Make `out` from a finished export; the measurements give the bytes of the weights before and after.

    Raises ReleaseMismatch when the export is of another format than the recipe's target takes.
    """
    found = exported.record["settings"].get("format")
    if found != recipe.format:
        raise ReleaseMismatch(
            f"the export stage in {exported.folder} holds a model in format {found}, "
            f"the {recipe.compile.target} target of recipe {recipe.name} takes {recipe.format}"
        )

    def make(folder: Path) -> dict[str, Any]:
        if recipe.format == "onnx":
            done = write_onnx(exported.folder, recipe, folder)
        else:
            import quantize_openvino

            done = quantize_openvino.write(exported.folder, recipe.weights, folder)
        precision = recipe.weights.precision
        check_shrunk(precision, done["weight_bytes_float32"], done["weight_bytes"], largest_part(recipe))
        return done

    return stage.run_stage(plan_stage(exported, recipe), out, make, force=force)


def write_onnx(source: Path, recipe: Recipe, out: Path) -> dict[str, Any]:
    """Write the recipe's form of the step graph in `source` to `out`; returns what was done."""
    import onnx_graph

    if converts(recipe):
        import quantize_onnx

        calibrated = recipe.weights.precision in CALIBRATED["onnx"]
        samples = texts.calibration_samples(source) if calibrated else []
        method = quantize_onnx.shrink(source, recipe.weights, recipe.kv_cache.precision, samples, out)
    else:
        method = "as exported"
        for name in onnx_graph.FILES:
            shutil.copyfile(source / name, out / name)
    before, after = onnx_graph.tensor_bytes(source), onnx_graph.tensor_bytes(out)
    sizes = {"weight_bytes_float32": sum(before.values()), "weight_bytes": sum(after.values())}
    return {"method": method, **sizes, "constants": after}


def largest_part(recipe: Recipe) -> float:
    """What part of float32 the recipe's weights may take."""
    if recipe.format == "openvino":
        return OPENVINO_LARGEST[recipe.weights.precision]
    table = FLOAT32_LARGEST if recipe.kv_cache.precision == "f32" else ONNX_LARGEST
    return table[recipe.weights.precision]


def check_shrunk(precision: str, before: int, after: int, largest: float) -> None:
    """Refuse weights that did not get as small as their precision promises: `largest` part of what they were."""
    if after > before * largest:
        raise InvalidCheckpoint(
            f"{precision} weights must take at most {largest:.0%} of float32, "
            f"got {after} of {before} bytes: the quantizer left weights alone"
        )


def main() -> None:
    options = stage.arguments(__doc__.splitlines()[0], "export").parse_args()
    recipe = Recipe.load(options.recipe)
    quantize(stage.open_input(options.export, "export"), recipe, options.out, force=options.force)


if __name__ == "__main__":
    stage.script(main)

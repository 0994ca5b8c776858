"""Stage quantize: weights of the float32 model are stored in fewer bits.

    python build/quantize.py --recipe build/recipes/smollm2-135m-int8.toml --export DIR --out DIR

bf16 stores every matrix in bf16. int8 goes through NNCF. int4 keeps weights on the 4-bit grid of a checkpoint that was
in 4 bits before, without loss; other checkpoints go through NNCF with AWQ and scale estimation on calibration texts.
"""

from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)
import grid
import ir
import numpy as np
import stage
import texts
from recipe import Recipe, Weights

from tritonforge.errors import InvalidCheckpoint

MATRIX_BYTES = 4096
"""Smaller constants are not worth storing in fewer bits."""
LARGEST = {"bf16": 0.55, "int8": 0.32, "int4": 0.26}
"""The largest part of the float32 size that the weights may keep; more means that a quantizer left them alone."""


def plan_stage(exported: stage.Done, recipe: Recipe) -> stage.Stage:
    """The quantization of one export; calibration texts are an input only where they are read."""
    inputs = {"export": exported.digest}
    if recipe.weights.precision == "int4":
        inputs["calibration"] = texts.digest(texts.CALIBRATION)
    return stage.Stage(
        name="quantize",
        makes=f"{recipe.weights.precision} model",
        inputs=inputs,
        settings=settings(recipe.weights),
        packages=("python", "openvino", "nncf", "tokenizers"),
        sources=("build/quantize.py", "build/grid.py", "build/ir.py", "build/texts.py"),
    )


def settings(weights: Weights) -> dict[str, Any]:
    """What of the recipe decides the outcome for its precision."""
    used = {"bf16": (), "int8": ("symmetric",)}.get(
        weights.precision, ("exact_grid", "symmetric", "group_size", "int4_ratio", "awq", "scale_estimation")
    )
    return {"precision": weights.precision, **{name: getattr(weights, name) for name in used}}


def quantize(exported: stage.Done, recipe: Recipe, out: Path, *, force: bool = False) -> stage.Done:
    """Make `out` from a finished export; the measurements give the bytes of the weights before and after."""

    def make(folder: Path) -> dict[str, Any]:
        import openvino as ov

        model = ov.Core().read_model(exported.folder / f"{ir.MODEL}.xml")
        model, method = shrink(model, recipe.weights, exported.folder)
        ir.normalise(model)
        ov.save_model(model, folder / f"{ir.MODEL}.xml", compress_to_fp16=recipe.weights.precision != "bf16")
        before = exported.record["files"][f"{ir.MODEL}.bin"]["bytes"]
        after = (folder / f"{ir.MODEL}.bin").stat().st_size
        check_shrunk(recipe.weights.precision, before, after)
        sizes = {"weight_bytes_float32": before, "weight_bytes": after, "constants": constant_bytes(model)}
        return {"method": method, **sizes}

    return stage.run_stage(plan_stage(exported, recipe), out, make, force=force)


def shrink(model: Any, weights: Weights, tokenizer_dir: Path) -> tuple[Any, str]:
    """The model with its weights in fewer bits, and the name of the method that was used."""
    if weights.precision == "bf16":
        store_bf16(model)
        return model, "bf16"
    import nncf

    kind = "SYM" if weights.symmetric else "ASYM"
    if weights.precision == "int8":
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode[f"INT8_{kind}"]), f"nncf int8 {kind}"
    grids = grid.find(model) if weights.exact_grid else None
    if grids:
        rest = nncf.IgnoredScope(names=list(grids))
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM, ignored_scope=rest)
        grid.store(model, grids)
        return model, "exact 4-bit grid"
    samples = [model_inputs(ids) for ids in texts.calibration_samples(tokenizer_dir)]
    model = nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode[f"INT4_{kind}"],
        ratio=weights.int4_ratio,
        group_size=weights.group_size,
        dataset=nncf.Dataset(samples),
        subset_size=len(samples),
        awq=weights.awq,
        scale_estimation=weights.scale_estimation,
    )
    return model, f"nncf int4 {kind}"


def store_bf16(model: Any) -> None:
    """Store the float32 matrices of a model in bf16; vectors, such as the weights of norms, stay as they are."""
    import ml_dtypes
    import openvino as ov
    import openvino.opset13 as ops

    for node in model.get_ordered_ops():
        if node.get_type_name() != "Constant" or node.get_element_type().get_type_name() != "f32":
            continue
        if len(node.get_output_shape(0)) < 2 or node.get_byte_size() < MATRIX_BYTES:
            continue
        tensor = ov.Tensor(ov.Type.bf16, node.output(0).get_shape())
        tensor.data[:] = node.data.astype(ml_dtypes.bfloat16).view(tensor.data.dtype)
        constant = ops.constant(tensor, shared_memory=False)
        constant.set_friendly_name(node.get_friendly_name())
        matrix = ops.convert(constant, "f32")
        for user in node.output(0).get_target_inputs():
            user.replace_source_output(matrix.output(0))


def model_inputs(ids: list[int]) -> dict[str, Any]:
    """Inputs of the stateful model for one whole sequence that starts with an empty cache."""
    length = len(ids)
    return {
        "input_ids": np.asarray([ids], np.int64),
        "attention_mask": np.ones((1, length), np.int64),
        "position_ids": np.arange(length, dtype=np.int64)[None],
        "beam_idx": np.zeros(1, np.int32),
        "nncf_reset_state": True,
    }


def constant_bytes(model: Any) -> dict[str, int]:
    """Bytes of the model's constants by element type: what the quantizer really stored."""
    total: dict[str, int] = {}
    for node in model.get_ops():
        if node.get_type_name() == "Constant":
            kind = node.get_element_type().get_type_name()
            total[kind] = total.get(kind, 0) + node.get_byte_size()
    return dict(sorted(total.items()))


def check_shrunk(precision: str, before: int, after: int) -> None:
    """Refuse weights that did not get as small as their precision promises."""
    if after > before * LARGEST[precision]:
        raise InvalidCheckpoint(
            f"{precision} weights must take at most {LARGEST[precision]:.0%} of float32, "
            f"got {after} of {before} bytes: the quantizer left weights alone"
        )


def main() -> None:
    options = stage.arguments(__doc__.splitlines()[0], "export").parse_args()
    recipe = Recipe.load(options.recipe)
    quantize(stage.open_input(options.export, "export"), recipe, options.out, force=options.force)


if __name__ == "__main__":
    stage.script(main)

"""Stage quantize: weights of the float32 model are stored in fewer bits.

    python build/quantize.py --recipe build/recipes/smollm2-135m-int8.toml --export DIR --out DIR

bf16 keeps every weight (stored as float16, which is finer than bf16 in this range), int8 and int4 go through NNCF.
"""

from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)
import numpy as np
import stage
import texts
from recipe import Recipe, Weights

from tritonforge.errors import InvalidCheckpoint

MODEL = "openvino_model"
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
        sources=("build/quantize.py", "build/texts.py"),
    )


def settings(weights: Weights) -> dict[str, Any]:
    """What of the recipe decides the outcome for its precision."""
    used = {"bf16": (), "int8": ("symmetric",)}.get(
        weights.precision, ("symmetric", "group_size", "int4_ratio", "awq", "scale_estimation")
    )
    return {"precision": weights.precision, **{name: getattr(weights, name) for name in used}}


def quantize(exported: stage.Done, recipe: Recipe, out: Path, *, force: bool = False) -> stage.Done:
    """Make `out` from a finished export; the measurements give the bytes of the weights before and after."""

    def make(folder: Path) -> dict[str, Any]:
        import openvino as ov

        model = ov.Core().read_model(exported.folder / f"{MODEL}.xml")
        if recipe.weights.precision != "bf16":
            model = compress(model, recipe.weights, exported.folder)
        normalise(model)
        ov.save_model(model, folder / f"{MODEL}.xml", compress_to_fp16=True)
        before = exported.record["files"][f"{MODEL}.bin"]["bytes"]
        after = (folder / f"{MODEL}.bin").stat().st_size
        check_shrunk(recipe.weights.precision, before, after)
        return {"weight_bytes_float32": before, "weight_bytes": after, "constants": constant_bytes(model)}

    return stage.run_stage(plan_stage(exported, recipe), out, make, force=force)


def compress(model: Any, weights: Weights, tokenizer_dir: Path) -> Any:
    """Compress the weights of an OpenVINO model to 8 or 4 bits."""
    import nncf

    kind = "SYM" if weights.symmetric else "ASYM"
    if weights.precision == "int8":
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode[f"INT8_{kind}"])
    samples = [model_inputs(ids) for ids in texts.calibration_samples(tokenizer_dir)]
    return nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode[f"INT4_{kind}"],
        ratio=weights.int4_ratio,
        group_size=weights.group_size,
        dataset=nncf.Dataset(samples),
        subset_size=len(samples),
        awq=weights.awq,
        scale_estimation=weights.scale_estimation,
    )


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


def normalise(model: Any) -> None:
    """Drop what exporters note in the file about themselves: tools and versions are in the record, once."""
    for key in ("optimum", "nncf", "conversion_parameters"):
        if key in model.rt_info:
            del model.rt_info[key]


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

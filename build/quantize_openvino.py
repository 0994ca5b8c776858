"""Stores the weights of an OpenVINO model in fewer bits; the quantize stage calls it for the openvino format.

bf16 stores every matrix in bf16. int8 goes through NNCF. int4 keeps weights on the 4-bit grid of a checkpoint that was
in 4 bits before, without loss; other checkpoints go through NNCF with AWQ and scale estimation on calibration texts.
"""

from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)
import grid
import ir
import numpy as np
import texts
from recipe import Weights

MATRIX_BYTES = 4096
"""Smaller constants are not worth storing in fewer bits."""
WEIGHTS = f"{ir.MODEL}.bin"


def write(source: Path, weights: Weights, out: Path) -> dict[str, Any]:
    """Write the model of the export in `source`, its weights in fewer bits, to `out`; returns what was done."""
    import openvino as ov

    model = ov.Core().read_model(source / f"{ir.MODEL}.xml")
    model, method = shrink(model, weights, source)
    ir.normalise(model)
    ov.save_model(model, out / f"{ir.MODEL}.xml", compress_to_fp16=weights.precision != "bf16")
    sizes = {"weight_bytes_float32": (source / WEIGHTS).stat().st_size, "weight_bytes": (out / WEIGHTS).stat().st_size}
    return {"method": method, **sizes, "constants": constant_bytes(model)}


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

"""Quantizes an ONNX step graph: weights, and for w8a8 and fp8 inputs, in QuantizeLinear / DequantizeLinear form.

The quantize stage calls `shrink`. The graph that comes out is what TensorRT compiles and ONNX Runtime measures. What
the methods are, and why no library's quantizer does this, is in docs/quantization.md.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx_calibrate
import onnx_convert
import onnx_graph
import onnx_ir as ir
import onnx_linears
import onnx_qdq as qdq
import onnx_scaling as scaling
from onnx_calibrate import Seen
from onnx_linears import Linear
from recipe import Weights

from tritonforge.errors import InvalidCheckpoint, InvalidRecipe

PACKAGES = ("onnxruntime", "ml_dtypes")
SOURCES = (
    "build/quantize_onnx.py",
    "build/onnx_calibrate.py",
    "build/onnx_convert.py",
    "build/onnx_graph.py",
    "build/onnx_linears.py",
    "build/onnx_qdq.py",
    "build/onnx_scaling.py",
)
METHODS = {
    "fp32": ("",),
    "fp16": ("",),
    "bf16": ("",),
    "int8": ("rtn",),
    "int4": ("awq", "rtn"),
    "w8a8": ("smoothquant", "rtn"),
    "fp8": ("rtn",),
}
"""What each precision can be made with; the first is taken where the recipe names none."""
CALIBRATED = (("int4", "awq"), ("w8a8", "smoothquant"), ("w8a8", "rtn"), ("fp8", "rtn"))
KV = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""Precisions of the KV cache, which is what the graph computes in."""
BEARABLE = 0.05
"""The largest error of a group's int8 outputs, as a part of their norm, with which SmoothQuant's inputs are kept."""
OWN_KV = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


def shrink(source: Path, weights: Weights, kv_precision: str, calibration: list[list[int]], out: Path) -> str:
    """Write the graph in `source` with its weights in fewer bits to `out`; returns the name of the method.

    `source` holds a float32 step graph, `calibration` token ids of sample texts (used where activations matter). Raises
    InvalidRecipe for what no method here can do, InvalidCheckpoint when a matrix does not fit or would be left alone.
    """
    method, compute = plan(weights, kv_precision)
    facts = onnx_graph.Graph.read(source)
    if facts.kv_dtype != "float32":
        raise InvalidCheckpoint(f"kv_dtype of the graph in {source} must be float32, got {facts.kv_dtype}")
    model = ir.load(source / onnx_graph.MODEL)
    groups = onnx_linears.groups(model)
    names = [group[0].node.inputs[0].name for group in groups]
    seen: dict[str, Seen] = {}
    if (weights.precision, method) in CALIBRATED:
        seen = onnx_calibrate.collect(source, names, calibration)
    if weights.precision not in OWN_KV:
        quantize = quantizer(weights, method, compute)
        for name, group in zip(names, groups, strict=True):
            quantize(model.graph, group, seen.get(name))
        check_quantized(model, weights.precision)
    if compute != "float32":
        to_16_bits(model, compute)
    onnx_convert.drop_unused(model.graph)
    ir.save(model, out / onnx_graph.MODEL, external_data=onnx_graph.DATA)
    replace(facts, kv_dtype=compute).write(out)
    rounded = sum(node.op_type == "QuantizeLinear" for node in model.graph)
    inputs = f"{rounded} of {len(groups)} inputs quantized," if rounded else ""
    return " ".join(filter(None, (weights.precision, method, inputs, f"computing in {compute}")))


def plan(weights: Weights, kv_precision: str) -> tuple[str, str]:
    """The method, and the type the graph will compute in; InvalidRecipe names what cannot be done."""
    precision = weights.precision
    if precision not in METHODS:
        raise InvalidRecipe(f"weights.precision must be one of {', '.join(METHODS)} for ONNX, got {precision!r}")
    if kv_precision not in KV:
        raise InvalidRecipe(
            f"kv_cache.precision must be one of {', '.join(KV)} for ONNX, got {kv_precision!r}: TensorRT's "
            "KVCacheUpdate takes no 8-bit cache, and in ONNX Runtime every step would dequantize the whole cache"
        )
    if OWN_KV.get(precision, kv_precision) != kv_precision:
        raise InvalidRecipe(
            f"kv_cache.precision must be {OWN_KV[precision]} with weights.precision {precision}, got {kv_precision!r}"
        )
    method = weights.method or METHODS[precision][0]
    if method not in METHODS[precision]:
        raise InvalidRecipe(
            f"weights.method must be {' or '.join(filter(None, METHODS[precision])) or 'absent'} "
            f"with weights.precision {precision}, got {method!r}"
        )
    return method, KV[kv_precision]


def quantizer(weights: Weights, method: str, compute: str) -> Callable[[ir.Graph, list[Linear], Seen | None], None]:
    """The function that quantizes one group of layers with a shared input, seen in calibration."""
    if weights.precision == "int4":
        return lambda graph, group, seen: int4(graph, group, seen, weights.group_size, compute, awq=method == "awq")
    if weights.precision == "int8":
        return lambda graph, group, _seen: int8(graph, group, compute)
    if weights.precision == "w8a8":
        return lambda graph, group, seen: w8a8(graph, group, seen, compute, smooth=method == "smoothquant")
    return lambda graph, group, seen: fp8(graph, group, seen, compute)


def int8(graph: ir.Graph, group: list[Linear], compute: str) -> None:
    """Weights only: one scale for each output column."""
    for linear in group:
        qdq.store_weight(graph, linear, qdq.quantize_columns(linear.matrix(), "int8", compute))


def int4(graph: ir.Graph, group: list[Linear], seen: Seen | None, block_size: int, compute: str, *, awq: bool) -> None:
    """Weights only, in blocks along the inputs; with AWQ scaled and clipped by what the inputs weigh."""
    for linear in group:
        rows = linear.weight.shape.numpy()[-2]
        if rows % block_size:
            raise InvalidRecipe(f"weights.group_size must divide the {rows} inputs of {linear.name}, got {block_size}")
    if awq and all(linear.weight.shape.rank() == 2 for linear in group):
        chosen = scaling.search_awq(seen, [linear.matrix() for linear in group], block_size, compute)
        scaling.apply(graph, group, chosen.factors)
        scaled_rows = seen.rows / chosen.factors
        for linear in group:
            matrix = linear.matrix()
            clips = scaling.search_clips(scaled_rows, matrix, block_size, compute)
            qdq.store_weight(graph, linear, qdq.quantize_blocks(matrix, block_size, compute, clips))
        return
    for linear in group:
        qdq.store_weight(graph, linear, qdq.quantize_blocks(linear.matrix(), block_size, compute))


def w8a8(graph: ir.Graph, group: list[Linear], seen: Seen, compute: str, *, smooth: bool) -> None:
    """Weights by output column, the input with one static scale; SmoothQuant moves outliers into the weights first.

    An input that even then would cost more than BEARABLE of the outputs is left alone.
    """
    largest = seen.largest
    if smooth and all(linear.weight.shape.rank() == 2 for linear in group):
        chosen = scaling.search_smooth(seen, [linear.matrix() for linear in group], compute)
        if chosen.error > BEARABLE:
            int8(graph, group, compute)
            return
        if chosen.alpha:
            scaling.apply(graph, group, chosen.factors)
            largest = largest / chosen.factors
    int8(graph, group, compute)
    qdq.quantize_input(graph, group, "int8", scaling.input_scale(largest, "int8", compute))


def fp8(graph: ir.Graph, group: list[Linear], seen: Seen, compute: str) -> None:
    """E4M3 for weights and input, one scale each; its exponent bears outliers that would need smoothing in int8."""
    for linear in group:
        qdq.store_weight(graph, linear, qdq.quantize_tensor(linear.matrix(), "fp8", compute))
    qdq.quantize_input(graph, group, "fp8", scaling.input_scale(seen.largest, "fp8", compute))


def check_quantized(model: ir.Model, precision: str) -> None:
    """Refuse a graph in which a matrix that should be quantized is still stored as it was, or none was there."""
    left = [linear.name for group in onnx_linears.groups(model) for linear in group]
    if left:
        raise InvalidCheckpoint(f"{precision} left {len(left)} matrices alone: {', '.join(left[:5])}")
    if not any(node.op_type == "DequantizeLinear" for node in model.graph):
        raise InvalidCheckpoint(f"the graph has no matrix that {precision} could be applied to")


def to_16_bits(model: ir.Model, compute: str) -> None:
    """Convert the graph; InvalidCheckpoint names a weight that float16 cannot hold."""
    try:
        onnx_convert.convert(model, compute)
    except OverflowError as error:
        raise InvalidCheckpoint(f"{error}; kv_cache.precision bf16 has the range of float32") from None

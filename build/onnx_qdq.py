"""Quantized tensors and the QuantizeLinear / DequantizeLinear nodes that stand for them in an ONNX graph.

The functions on arrays know no graph; `store_weight` and `quantize_input` put their results into one. Scales are
rounded to the type that the graph computes in before anything is divided by them, so the file holds exactly the numbers
that were optimised. All grids are symmetric, without zero points: TensorRT takes no others.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_convert import constant
from onnx_linears import Linear

LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""The largest magnitude of each grid: int4 leaves -8 out, as int8 leaves -128; fp8 is E4M3 without infinities."""
STORED = {"int8": np.dtype(np.int8), "int4": np.dtype(ml_dtypes.int4), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
TINY = 2.0**-14
"""The smallest normal float16: a scale below it would lose its digits."""


@dataclass(frozen=True)
class Quantized:
    """`values` [..., in, out] in the stored type; `scale` is float32, of `axis` and `block_size` as ONNX defines them.

    block_size 0 is one scale for each index of `axis`; axis None is one scale for the whole tensor.
    """

    values: np.ndarray
    scale: np.ndarray
    axis: int | None
    block_size: int = 0

    def dequantized(self) -> np.ndarray:
        """The float32 tensor that is really computed with."""
        if self.block_size:
            scale = np.repeat(self.scale, self.block_size, axis=self.axis)
        elif self.axis is None:
            scale = self.scale
        else:
            scale = np.expand_dims(self.scale, [d for d in range(self.values.ndim) if d != self.axis])
        return self.values.astype(np.float32) * scale


def rounded_scale(largest: np.ndarray, grid: str, compute: str) -> np.ndarray:
    """The scale that lets magnitudes up to `largest` onto `grid`, in float32, representable in type `compute`."""
    wanted = np.maximum(np.asarray(largest, np.float32) / LARGEST[grid], TINY)
    return wanted.astype(np.dtype(getattr(ml_dtypes, compute, compute))).astype(np.float32)


def onto_grid(scaled: np.ndarray, grid: str) -> np.ndarray:
    """`scaled` rounded to the nearest value of `grid` (ties to even), what lies outside clipped; in the stored type."""
    clipped = np.clip(scaled, -LARGEST[grid], LARGEST[grid])
    return (clipped if grid == "fp8" else np.rint(clipped)).astype(STORED[grid])


def quantize_columns(matrix: np.ndarray, grid: str, compute: str) -> Quantized:
    """One scale for each output column of [in, out]; of [experts, in, out] for each expert and column, as one block."""
    scale = rounded_scale(np.abs(matrix).max(axis=-2, keepdims=True), grid, compute)
    values = onto_grid(matrix / scale, grid)
    if matrix.ndim == 2:
        return Quantized(values, scale[0], axis=1)
    return Quantized(values, scale, axis=matrix.ndim - 2, block_size=matrix.shape[-2])


def quantize_blocks(matrix: np.ndarray, block_size: int, compute: str, clip: np.ndarray | None = None) -> Quantized:
    """int4 with one scale for `block_size` weights along the inputs of [..., in, out], rounded to nearest.

    `clip` [..., in / block_size, out], in (0, 1], shortens the range of each block. `in` must be a multiple of
    block_size.
    """
    *lead, rows, columns = matrix.shape
    blocks = matrix.reshape(*lead, rows // block_size, block_size, columns)
    largest = np.abs(blocks).max(axis=-2)
    scale = rounded_scale(largest if clip is None else largest * clip, "int4", compute)
    values = onto_grid(blocks / np.expand_dims(scale, -2), "int4").reshape(matrix.shape)
    return Quantized(values, scale, axis=matrix.ndim - 2, block_size=block_size)


def quantize_tensor(matrix: np.ndarray, grid: str, compute: str) -> Quantized:
    """One scale for the whole tensor."""
    scale = rounded_scale(np.abs(matrix).max(), grid, compute)
    return Quantized(onto_grid(matrix / scale, grid), scale, axis=None)


def store_weight(graph: ir.Graph, linear: Linear, quantized: Quantized) -> None:
    """Store the weight of `linear` quantized, with a DequantizeLinear in front of the product."""
    if linear.transposed:
        raise ValueError(f"{linear.name} is stored transposed; only heads are, and they are not quantized")
    name = linear.name
    values = constant(graph, f"{name}_quantized", _tensor(quantized.values))
    scale = constant(graph, f"{name}_scale", quantized.scale)
    attributes = {} if quantized.axis is None else {"axis": quantized.axis}
    if quantized.block_size:
        attributes["block_size"] = quantized.block_size
    node = ir.node("DequantizeLinear", [values, scale], attributes, name=f"{linear.node.name}/DequantizeLinear")
    _place(graph, node, linear.node, f"{name}_dequantized", linear.weight.shape)
    linear.node.replace_input_with(1, node.outputs[0])


def quantize_input(graph: ir.Graph, linears: list[Linear], grid: str, scale: np.ndarray) -> None:
    """Round the shared input of `linears` onto `grid` with one static scale: QuantizeLinear, DequantizeLinear."""
    first, value = linears[0].node, linears[0].node.inputs[0]
    step = constant(graph, f"{value.name}_scale", np.asarray(scale, np.float32))
    zero = constant(graph, f"{value.name}_zero_point", _tensor(np.zeros((), STORED[grid])))
    down = ir.node("QuantizeLinear", [value, step, zero], name=f"{value.name}/QuantizeLinear")
    _place(graph, down, first, f"{value.name}_quantized", value.shape, zero.dtype)
    up = ir.node("DequantizeLinear", [down.outputs[0], step, zero], name=f"{value.name}/DequantizeLinear")
    _place(graph, up, first, f"{value.name}_dequantized", value.shape)
    for linear in linears:
        linear.node.replace_input_with(0, up.outputs[0])


def _place(
    graph: ir.Graph,
    node: ir.Node,
    before: ir.Node,
    name: str,
    shape: ir.Shape | None,
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> None:
    """Put a node of one output into the graph in front of another."""
    out = node.outputs[0]
    out.name, out.type, out.shape = name, ir.TensorType(dtype), shape
    graph.insert_before(before, node)


def _tensor(array: np.ndarray) -> ir.TensorProtocol:
    """A tensor for a graph; 4-bit values are packed two to a byte when it is written."""
    return ir.tensor(array)

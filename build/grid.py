"""Weights that lie on a 4-bit grid already are stored on that grid, without loss.

A checkpoint that was in 4 bits once (a Q4 GGUF file) de-quantizes to at most 16 evenly spaced values in each group of
32 weights: w = minimum + q * step. Any quantizer with whole-numbered zero points moves all of them; a zero point with
a fraction keeps them. The quantize stage asks `find`, and `store` rewrites the model.

    Constant u4 [rows, groups, 32] -> Convert -> Subtract zero point -> Multiply step -> Reshape -> MatMul
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

GROUP = 32
LEVELS = 16
TOLERANCE = 0.01
"""How far from its grid point a weight may lie, in steps: float rounding, no more."""


@dataclass(frozen=True)
class Grid:
    """A matrix [rows, columns]: q in [0, 15] is [rows, groups, GROUP], zero_point and step are [rows, groups, 1]."""

    q: np.ndarray
    zero_point: np.ndarray
    step: np.ndarray

    def values(self) -> np.ndarray:
        """The float32 matrix that the grid stands for."""
        values = (self.q.astype(np.float32) - self.zero_point.astype(np.float32)) * self.step.astype(np.float32)
        return values.reshape(len(values), -1)


def fit(matrix: np.ndarray) -> Grid | None:
    """The grid that `matrix` lies on, or None when a group of its rows lies on none.

    The spacing is unknown: the largest number of steps between minimum and maximum that fits is taken, then reduced.
    """
    rows, columns = matrix.shape
    if columns % GROUP:
        return None
    groups = matrix.astype(np.float32).reshape(rows, columns // GROUP, GROUP)
    low = groups.min(axis=-1, keepdims=True)
    width = groups.max(axis=-1, keepdims=True) - low
    flat = width == 0
    q = np.zeros_like(groups)
    step = np.where(flat, np.maximum(np.abs(low), 1.0), 0.0).astype(np.float32)
    for count in range(LEVELS - 1, 0, -1):
        position = (groups - low) / np.where(flat, 1.0, width) * count
        nearest = np.rint(position)
        fits = (np.abs(position - nearest).max(axis=-1, keepdims=True) < TOLERANCE) & (step == 0)
        q = np.where(fits, nearest, q)
        step = np.where(fits, width / count, step)
        if step.all():
            break
    if not step.all():
        return None
    q = q.astype(np.uint8)
    common = np.maximum(np.gcd.reduce(q, axis=-1, keepdims=True), 1)
    q, step = q // common, (step * common).astype(np.float16)
    zero_point = (-low / step.astype(np.float32)).astype(np.float16)
    found = Grid(q, zero_point, step)
    if not (np.isfinite(zero_point).all() and step.all()):
        return None
    missed = np.abs(found.values().reshape(groups.shape) - groups) / step.astype(np.float32)
    return found if missed.max() < 2 * TOLERANCE else None


def matmuls(model: Any) -> list[Any]:
    """The MatMul nodes of a language model whose second input is a float32 matrix; not the LM head, nor a shared one.

    Embeddings and head are where few bits hurt most: they are kept in more bits by whoever quantizes the rest.
    """
    head = model.get_results()[0].input_value(0).get_node()
    while head.get_type_name() != "MatMul":
        head = head.input_value(0).get_node()
    found = []
    for node in model.get_ops():
        if node.get_type_name() != "MatMul" or node.get_friendly_name() == head.get_friendly_name():
            continue
        weight = node.input_value(1).get_node()
        plain = weight.get_type_name() == "Constant" and weight.get_element_type().get_type_name() == "f32"
        if plain and len(weight.get_output_shape(0)) == 2 and len(weight.output(0).get_target_inputs()) == 1:
            found.append(node)
    return found


def find(model: Any) -> dict[str, Grid] | None:
    """{name of a MatMul: its grid}, or None unless every matrix that matters lies on one."""
    grids = {}
    for node in matmuls(model):
        if not node.get_attributes()["transpose_b"]:
            return None
        grid = fit(node.input_value(1).get_node().data)
        if grid is None:
            return None
        grids[node.get_friendly_name()] = grid
    return grids or None


def store(model: Any, grids: dict[str, Grid]) -> None:
    """Replace the weights of the MatMul nodes named in `grids` by their 4-bit form."""
    import openvino as ov
    import openvino.opset13 as ops

    for node in matmuls(model):
        grid = grids[node.get_friendly_name()]
        name = node.input_value(1).get_node().get_friendly_name()
        flat = grid.q.reshape(-1)
        packed = ov.Tensor(np.ascontiguousarray(flat[0::2] | (flat[1::2] << 4)), ov.Shape(grid.q.shape), ov.Type.u4)
        constant = ops.constant(packed, shared_memory=False)
        constant.set_friendly_name(name)
        centred = ops.subtract(ops.convert(constant, "f16"), ops.constant(grid.zero_point))
        scaled = ops.multiply(centred, ops.constant(grid.step))
        shape = ops.constant(np.array([grid.q.shape[0], -1], np.int64))
        weight = ops.convert(ops.reshape(scaled, shape, special_zero=False), "f32")
        node.input(1).replace_source_output(weight.output(0))
    model.validate_nodes_and_infer_types()

"""Exact 4-bit storage: what lies on a grid comes back as it was, what does not is left to a quantizer."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))

import grid


def on_grid(rng, rows=24, columns=96, levels=16):
    """A matrix as a 4-bit GGUF file de-quantizes it: float16 step and minimum in each group of 32."""
    q = rng.integers(0, levels, (rows, columns // 32, 32))
    step = rng.uniform(0.001, 0.02, (rows, columns // 32, 1)).astype(np.float16).astype(np.float32)
    low = -(step * rng.uniform(-1, 16, step.shape)).astype(np.float16).astype(np.float32)
    return (q * step + low).astype(np.float32).reshape(rows, columns)


@pytest.mark.parametrize("levels", [2, 3, 9, 16])
def test_a_matrix_on_a_grid_comes_back(levels):
    """Also when a group uses fewer levels than 16; the zero point's float16 costs under a hundredth of a step."""
    matrix = on_grid(np.random.default_rng(levels), levels=levels)
    fitted = grid.fit(matrix)
    steps = np.repeat(fitted.step.astype(np.float32), 32, axis=-1).reshape(matrix.shape)
    assert fitted.q.max() <= 15
    assert (np.abs(fitted.values() - matrix) / steps).max() < 0.02


def test_a_group_of_equal_weights_is_on_a_grid():
    matrix = on_grid(np.random.default_rng(1))
    matrix[3, :32] = -0.125
    matrix[4, :32] = 0.0
    found = grid.fit(matrix).values()
    assert np.allclose(found[3, :32], -0.125, atol=1e-3) and not found[4, :32].any()


def test_weights_that_were_never_in_4_bits_are_on_no_grid():
    rng = np.random.default_rng(2)
    assert grid.fit(rng.normal(size=(8, 64)).astype(np.float32)) is None
    assert grid.fit(on_grid(rng, levels=17)) is None
    one_weight_off = on_grid(rng)
    one_weight_off[5, 40] += 0.0004
    assert grid.fit(one_weight_off) is None


def test_a_zero_point_that_float16_cannot_hold_is_no_grid():
    """All weights far from zero: the zero point is some hundreds of steps, and its rounding a fifth of one."""
    matrix = on_grid(np.random.default_rng(6))
    matrix[2, 64:] = 3.0 + 0.001 * np.arange(32) % 0.016
    assert grid.fit(matrix) is None


def test_columns_that_do_not_divide_into_groups_are_on_no_grid():
    assert grid.fit(on_grid(np.random.default_rng(3))[:, :80]) is None


def model_of(*matrices):
    """An OpenVINO model that multiplies by each matrix [out, in] in turn; the last one is its LM head."""
    import openvino as ov
    import openvino.opset13 as ops

    x = ops.parameter([-1, matrices[0].shape[1]], np.float32)
    node = x
    for matrix in matrices:
        node = ops.matmul(node, ops.constant(matrix), False, True)
    return ov.Model([node], [x], "tiny")


def test_the_rewritten_model_computes_the_same():
    """The 4-bit model differs by the float16 of the zero points only; the LM head stays float32."""
    import openvino as ov

    rng = np.random.default_rng(4)
    first, head = on_grid(rng), rng.normal(size=(8, 24)).astype(np.float32)
    model = model_of(first, head)
    grids = grid.find(model)
    assert len(grids) == 1
    grid.store(model, grids)
    constants = [op for op in model.get_ops() if op.get_type_name() == "Constant"]
    kinds = [op.get_element_type().get_type_name() for op in constants]
    assert kinds.count("u4") == 1 and kinds.count("f32") == 1
    rows = rng.normal(size=(5, 96)).astype(np.float32)
    found = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(rows)[0]
    expected = rows @ first.T @ head.T
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


def test_one_matrix_off_the_grid_leaves_the_whole_model_to_the_quantizer():
    rng = np.random.default_rng(5)
    off = rng.normal(size=(96, 96)).astype(np.float32)
    assert grid.find(model_of(on_grid(rng, rows=96), off, on_grid(rng))) is None
    assert grid.find(model_of(on_grid(rng, rows=96), on_grid(rng, rows=96), on_grid(rng))) is not None


def test_a_model_without_matrices_has_no_grid():
    assert grid.find(model_of(on_grid(np.random.default_rng(7)))) is None

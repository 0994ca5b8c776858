"""Moving magnitude between the inputs of linear layers and their weights, without changing what they compute.

    x W  =  (x / s) (diag(s) W)        s: one positive factor for each input channel

SmoothQuant (Xiao et al., arXiv 2211.10438) takes from inputs with outliers what weights can bear: both then fit int8.
AWQ (Lin et al., arXiv 2306.00978) enlarges the weights of channels that carry much, so that int4 rounds them finer.
`apply` changes the graph; the searches are functions on arrays. quantize_onnx is the caller.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnx_qdq as qdq
from onnx_calibrate import Seen
from onnx_convert import constant
from onnx_linears import Linear

SMOOTHNESS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""SmoothQuant's alpha: the part of the outliers that moves into the weights. 0 here leaves the layer as it is."""
AWQ_STEPS = 10
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Parts of a block's range that the search for clipping tries."""
SMALLEST = 1e-5


@dataclass(frozen=True)
class Chosen:
    """The factors [channels] found for a group of layers, the parameter that gave them, and what error they leave.

    `error` is the norm of what the quantized outputs miss, as a part of the norm of the exact ones.
    """

    factors: np.ndarray
    alpha: float
    error: float


def smooth_factors(largest_input: np.ndarray, largest_weight: np.ndarray, alpha: float) -> np.ndarray:
    """s = max|x|^alpha / max|w|^(1 - alpha) for each input channel (SmoothQuant, equation 4)."""
    inputs, weights = np.maximum(largest_input, SMALLEST), np.maximum(largest_weight, SMALLEST)
    return _sane(inputs**alpha / weights ** (1 - alpha))


def awq_factors(mean_input: np.ndarray, alpha: float) -> np.ndarray:
    """s = mean|x|^alpha for each input channel, scaled so that the extremes lie evenly around 1 (AWQ, equation 5)."""
    factors = np.maximum(mean_input, SMALLEST) ** alpha
    return _sane(factors / np.sqrt(factors.max() * factors.min()))


def search_smooth(seen: Seen, matrices: list[np.ndarray], compute: str) -> Chosen:
    """The alpha whose int8 inputs and weights give the least squared error of the layers' outputs."""
    rows = seen.rows
    exact = [rows @ matrix for matrix in matrices]
    largest_weight = np.max([np.abs(matrix).max(axis=1) for matrix in matrices], axis=0)

    def error(factors: np.ndarray) -> float:
        step = input_scale(seen.largest / factors, "int8", compute)
        inputs = qdq.onto_grid(rows / factors / step, "int8").astype(np.float32) * step
        outputs = (inputs @ int8_weights(matrix, factors, compute) for matrix in matrices)
        return sum(float(np.square(out - true).sum()) for out, true in zip(outputs, exact, strict=True))

    ones = np.ones_like(seen.largest)
    factors = {alpha: smooth_factors(seen.largest, largest_weight, alpha) if alpha else ones for alpha in SMOOTHNESS}
    return _least(factors, error, exact)


def search_awq(seen: Seen, matrices: list[np.ndarray], block_size: int, compute: str) -> Chosen:
    """The alpha in [0, 1) whose int4 weights give the least squared error of the layers' outputs."""
    rows = seen.rows
    exact = [rows @ matrix for matrix in matrices]

    def error(factors: np.ndarray) -> float:
        total = 0.0
        for matrix in matrices:
            rounded = qdq.quantize_blocks(matrix * factors[:, None], block_size, compute).dequantized()
            total += float(np.square(rows @ (rounded / factors[:, None] - matrix)).sum())
        return total

    alphas = [step / AWQ_STEPS for step in range(AWQ_STEPS)]
    return _least({alpha: awq_factors(seen.mean, alpha) for alpha in alphas}, error, exact)


def search_clips(rows: np.ndarray, matrix: np.ndarray, block_size: int, compute: str) -> np.ndarray:
    """For each block and column of [in, out] the part of its range that gives the least squared error of its output.

    Returns [in / block_size, out]. AWQ's search for clipping, with each block weighed by its own input tokens `rows`.
    """
    count = len(matrix) // block_size
    inputs = rows.reshape(len(rows), count, block_size).transpose(1, 0, 2)
    gram = inputs.transpose(0, 2, 1) @ inputs
    best, least = np.ones((count, matrix.shape[1]), np.float32), np.full((count, matrix.shape[1]), np.inf)
    for clip in CLIPS:
        parts = np.full_like(best, clip)
        missed = qdq.quantize_blocks(matrix, block_size, compute, parts).dequantized() - matrix
        missed = missed.reshape(count, block_size, -1)
        error = (missed * (gram @ missed)).sum(axis=1)
        best, least = np.where(error < least, parts, best), np.minimum(error, least)
    return best


def input_scale(largest: np.ndarray, grid: str, compute: str) -> np.ndarray:
    """The static scale of an input whose channels reach `largest`."""
    return qdq.rounded_scale(largest.max(), grid, compute)


def int8_weights(matrix: np.ndarray, factors: np.ndarray, compute: str) -> np.ndarray:
    """What int8 makes of diag(factors) W, as float32."""
    return qdq.quantize_columns(matrix * factors[:, None], "int8", compute).dequantized()


def apply(graph: ir.Graph, linears: list[Linear], factors: np.ndarray) -> None:
    """Divide the shared input of `linears` by `factors` and multiply the rows of their weights by them.

    Where a stored vector scales that input for these layers alone (the weight of a norm), the division goes into a copy
    of it; else a Mul is put in front, which an engine can fuse into what makes the input.
    """
    for linear in linears:
        scaled = linear.matrix() * factors[:, None]
        value = constant(graph, linear.name, (scaled.T if linear.transposed else scaled).astype(np.float32))
        linear.node.replace_input_with(1, value)
    source = linears[0].node.inputs[0]
    inverse = (1.0 / factors).astype(np.float32)
    nodes = {linear.node for linear in linears}
    maker, private = source.producer(), {use.node for use in source.uses()} == nodes
    slot = _vector_slot(maker, len(factors)) if private else None
    if slot is not None:
        vector = maker.inputs[slot].const_value.numpy() * inverse
        maker.replace_input_with(slot, constant(graph, f"{maker.inputs[slot].name}_scaled", vector))
        return
    node = ir.node(
        "Mul", [source, constant(graph, f"{source.name}_factors", inverse)], name=f"{source.name}/Mul_scaled"
    )
    out = node.outputs[0]
    out.name, out.type, out.shape = f"{source.name}_scaled", source.type, source.shape
    graph.insert_before(linears[0].node, node)
    for linear in linears:
        linear.node.replace_input_with(0, out)


def _vector_slot(node: ir.Node | None, channels: int) -> int | None:
    """Which input of a Mul or an RMSNormalization is a stored vector over the last axis."""
    if node is None or node.op_type not in ("Mul", "RMSNormalization"):
        return None
    for index, value in enumerate(node.inputs):
        if value.const_value is not None and value.const_value.shape.numpy() == (channels,):
            return index
    return None


def _least(factors: dict[float, np.ndarray], error: Callable[[np.ndarray], float], exact: list[np.ndarray]) -> Chosen:
    """Of the factors by alpha those with the least squared error of the outputs, which are `exact` without any."""
    squares = {alpha: error(values) for alpha, values in factors.items()}
    alpha = min(squares, key=squares.__getitem__)
    whole = sum(float(np.square(values).sum()) for values in exact)
    return Chosen(factors[alpha], alpha, float(np.sqrt(squares[alpha] / max(whole, SMALLEST**2))))


def _sane(factors: np.ndarray) -> np.ndarray:
    """Factors that float16 holds with all digits, in float32."""
    return np.clip(factors, 1e-3, 1e3).astype(np.float32)

"""How 8-bit matrix products bear outliers in their inputs: LLM.int8()'s decomposition beside SmoothQuant.

    .venv-build/bin/python -m benchmarks.outliers EXPORT_DIR

EXPORT_DIR is a finished export stage in the onnx format. Ranges are taken on the calibration texts, errors on the
quality texts. Every method computes x W of the linear layers; its error is |x W - exact| / |exact| (Frobenius norms),
the median over the layers of one kind. Nothing is timed: what each method costs on a GPU is in docs/quantization.md.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "build")]

import onnx_calibrate  # noqa: E402
import onnx_graph  # noqa: E402
import onnx_ir as ir  # noqa: E402
import onnx_linears  # noqa: E402
import onnx_qdq as qdq  # noqa: E402
import onnx_scaling as scaling  # noqa: E402
import texts  # noqa: E402

THRESHOLD = 6.0
"""LLM.int8() (arXiv 2208.07339) keeps every input channel with a magnitude of at least this in 16 bits."""
TOKENS = 256
"""Tokens of each quality text that are looked at."""


def round_inputs(rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What int8 makes of `rows` with `scale`, a number or one for each row."""
    return qdq.onto_grid(rows / scale, "int8").astype(np.float32) * scale


def by_token(rows: np.ndarray) -> np.ndarray:
    """Scales [rows, 1] that hold the largest magnitude of each row: dynamic, taken while the model runs."""
    return np.maximum(np.abs(rows).max(axis=1, keepdims=True) / 127, qdq.TINY)


def products(rows: np.ndarray, seen: onnx_calibrate.Seen, matrix: np.ndarray) -> dict[str, np.ndarray]:
    """{method: its product of `rows` [tokens, in] with `matrix` [in, out]}; `seen` is what calibration saw."""
    ones = np.ones(len(matrix), np.float32)
    smooth = scaling.search_smooth(seen, [matrix], "float32").factors
    half = scaling.smooth_factors(seen.largest, np.abs(matrix).max(axis=1), 0.5)

    def static(factors: np.ndarray) -> np.ndarray:
        scale = scaling.input_scale(seen.largest / factors, "int8", "float32")
        return round_inputs(rows / factors, scale) @ scaling.int8_weights(matrix, factors, "float32")

    weights = scaling.int8_weights(matrix, ones, "float32")
    outliers = np.abs(rows).max(axis=0) >= THRESHOLD
    rest = np.where(outliers, 0, rows)
    return {
        "weights only": rows @ weights,
        "static": static(ones),
        "SmoothQuant 0.5": static(half),
        "SmoothQuant, alpha searched": static(smooth),
        "by token": round_inputs(rows, by_token(rows)) @ weights,
        "LLM.int8()": round_inputs(rest, by_token(rest)) @ np.where(outliers[:, None], 0, weights)
        + rows[:, outliers] @ matrix[outliers],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=Path, help="a finished export stage in the onnx format")
    folder = parser.parse_args().export
    model = ir.load(folder / onnx_graph.MODEL)
    linears = {group[0].node.inputs[0].name: group[0] for group in onnx_linears.groups(model)}
    calibrated = onnx_calibrate.collect(folder, linears, texts.calibration_samples(folder))
    windows = [ids[:TOKENS] for ids in texts.quality_windows(folder).values()]
    judged = onnx_calibrate.collect(folder, linears, windows)
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    columns: dict[str, list[float]] = defaultdict(list)
    for name, linear in linears.items():
        if linear.weight.shape.rank() != 2:
            continue
        rows, matrix = judged[name].rows, linear.matrix()
        exact, kind = rows @ matrix, linear.name.split(".")[-2]
        columns[kind].append((np.abs(rows).max(axis=0) >= THRESHOLD).mean())
        for method, found in products(rows, calibrated[name], matrix).items():
            errors[method][kind].append(float(np.linalg.norm(found - exact) / np.linalg.norm(exact)))
    kinds = list(columns)
    print(f"| error in %, median over layers | {' | '.join(kinds)} |")
    print("|---|" + "---|" * len(kinds))
    for method, found in errors.items():
        print(f"| {method} | {' | '.join(f'{100 * np.median(found[kind]):.2f}' for kind in kinds)} |")
    worst = [f"{100 * max(errors['static'][kind]):.2f}" for kind in kinds]
    print(f"| static, worst layer | {' | '.join(worst)} |")
    print(
        f"| channels beyond {THRESHOLD:g}, % | {' | '.join(f'{100 * np.mean(columns[kind]):.1f}' for kind in kinds)} |"
    )


if __name__ == "__main__":
    main()

"""What flows into the linear layers of a float32 ONNX step graph, seen by running calibration texts in ONNX Runtime.

quantize_onnx asks for it before it changes the graph. Every text is one prefill into an empty cache, on the CPU.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_graph

ROWS = 512
"""Tokens kept of each input, evenly from all samples: enough to weigh errors with, small enough for large models."""


@dataclass
class Seen:
    """One input [tokens, channels] over all calibration tokens: `largest` and `mean` are of magnitudes, by channel.

    `rows` are up to ROWS of the tokens themselves.
    """

    largest: np.ndarray
    total: np.ndarray
    tokens: int = 0
    kept: list[np.ndarray] = field(default_factory=list)

    @property
    def mean(self) -> np.ndarray:
        """Mean magnitude of each channel."""
        return self.total / self.tokens

    @property
    def rows(self) -> np.ndarray:
        """The kept tokens [rows, channels]."""
        return np.concatenate(self.kept)

    def add(self, values: np.ndarray, keep: int) -> None:
        """Take in the tokens of one sample [tokens, channels] and keep up to `keep` of them."""
        magnitude = np.abs(values)
        np.maximum(self.largest, magnitude.max(axis=0), out=self.largest)
        self.total += magnitude.sum(axis=0, dtype=np.float64)
        self.tokens += len(values)
        chosen = np.linspace(0, len(values) - 1, min(keep, len(values))).astype(int)
        self.kept.append(values[chosen].astype(np.float32))


def collect(folder: Path, names: Iterable[str], samples: list[list[int]]) -> dict[str, Seen]:
    """{name of a value in the graph of `folder`: what it held} over the token ids in `samples`.

    The graph must be in float32. Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("calibration needs at least one sample of token ids, got none")
    graph, names = onnx_graph.Graph.read(folder), list(names)
    session = open_session(folder, names)
    keep = max(1, ROWS // len(samples))
    seen: dict[str, Seen] = {}
    for ids in samples:
        for name, value in zip(names, session.run(names, prefill_inputs(graph, ids)), strict=True):
            values = value.reshape(-1, value.shape[-1])
            if name not in seen:
                channels = values.shape[-1]
                seen[name] = Seen(np.zeros(channels, np.float32), np.zeros(channels, np.float64))
            seen[name].add(values, keep)
    return seen


def open_session(folder: Path, extra_outputs: list[str]):
    """An ONNX Runtime session on the CPU of the graph in `folder` that also gives the named inner values."""
    import onnx
    import onnxruntime

    model = onnx.load(folder / onnx_graph.MODEL, load_external_data=False)
    present = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in extra_outputs if name not in present)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # else inputs are rounded to int8
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / onnx_graph.MODEL
        path.write_bytes(model.SerializeToString())
        return onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])


def prefill_inputs(graph: onnx_graph.Graph, ids: list[int]) -> dict[str, np.ndarray]:
    """Inputs of one call that computes a whole sequence with an empty cache, and the logits of its last token."""
    inputs = {
        "input_ids": np.asarray([ids], np.int64),
        "write_index": np.zeros(1, np.int64),
        "logit_rows": np.asarray([len(ids) - 1], np.int64),
    }
    for index, layer in enumerate(graph.layers):
        for part in ("key", "value"):
            inputs[f"past_{part}_{index}"] = np.zeros((1, layer.kv_heads, len(ids), layer.head_size), np.float32)
    return inputs

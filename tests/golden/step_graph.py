"""A tiny random step graph, written by hand: two layers of attention over a linear KV cache, no torch needed.

write(folder)  writes model.onnx, model.onnx.data and graph.json as the export stage does
"""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCAB = 40
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 8
HIDDEN = HEADS * HEAD_SIZE
LAYERS = 2
CONTEXT = 8192


class Writer:
    """Collects nodes and weights."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(0)

    def weight(self, name: str, *shape: int) -> str:
        values = self._rng.standard_normal(shape) * shape[0] ** -0.5
        return self.constant(name, values.astype(self.dtype))

    def constant(self, name: str, values: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(self, op: str, *inputs: str, out: str, **attributes) -> str:
        self.nodes.append(helper.make_node(op, inputs, [out], **attributes))
        return out


def write(folder: Path, dtype: str = "float32") -> Path:
    """Write the graph's files to `folder`; `dtype` is that of weights and KV cache."""
    writer = Writer(np.dtype(dtype))
    kv_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    writer.constant("axis", np.array([1]))
    writer.constant("zero", np.array(0))
    writer.constant("one", np.array(1))
    writer.constant("flat", np.array([-1, HIDDEN]))
    angles = np.arange(CONTEXT)[:, None] * 100.0 ** (-np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    writer.constant("cos", np.cos(angles).astype(dtype))
    writer.constant("sin", np.sin(angles).astype(dtype))
    writer.node("Shape", "input_ids", out="shape", start=1, end=2)
    writer.node("Squeeze", "shape", out="tokens")
    writer.node("Range", "zero", "tokens", "one", out="offsets")
    writer.node("Unsqueeze", "write_index", "axis", out="starts")
    writer.node("Add", "starts", "offsets", out="positions")
    writer.node("Add", "write_index", "tokens", out="kv_len")
    hidden = writer.node("Gather", writer.weight("embedding", VOCAB, HIDDEN), "input_ids", out="embedded")
    for layer in range(LAYERS):
        hidden = write_layer(writer, layer, hidden)
    rows = writer.node("Reshape", hidden, "flat", out="rows_of_all")
    rows = writer.node("Gather", rows, "logit_rows", out="wanted")
    rows = writer.node("MatMul", rows, writer.weight("head", HIDDEN, VOCAB), out="narrow_logits")
    writer.node("Cast", rows, out="logits", to=TensorProto.FLOAT)
    cache = ["batch", KV_HEADS, "cache_len", HEAD_SIZE]
    names = [f"{part}_{layer}" for layer in range(LAYERS) for part in ("key", "value")]
    integers = {"input_ids": ["batch", "tokens"], "write_index": ["batch"], "logit_rows": ["rows"]}
    graph = helper.make_graph(
        writer.nodes,
        "step",
        [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in integers.items()]
        + [helper.make_tensor_value_info(f"past_{name}", kv_type, cache) for name in names],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", VOCAB])]
        + [helper.make_tensor_value_info(f"present_{name}", kv_type, cache) for name in names],
        writer.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    facts = {
        "format": "onnx",
        "num_layers": LAYERS,
        "vocab_size": VOCAB,
        "kv_dtype": dtype,
        "layers": [{"kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "window": 0}] * LAYERS,
        "max_position_embeddings": CONTEXT,
    }
    (folder / "graph.json").write_text(json.dumps(facts))
    return folder


def write_layer(writer: Writer, layer: int, hidden: str) -> str:
    """Add a layer: attention over the cache, with a residual; returns its output."""

    def heads(kind: str, count: int) -> str:
        weight = writer.weight(f"{kind}_weight_{layer}", HIDDEN, count * HEAD_SIZE)
        flat = writer.node("MatMul", hidden, weight, out=f"{kind}_flat_{layer}")
        shape = writer.constant(f"{kind}_shape_{layer}", np.array([0, 0, count, HEAD_SIZE]))
        split = writer.node("Reshape", flat, shape, out=f"{kind}_split_{layer}")
        return writer.node("Transpose", split, out=f"{kind}_heads_{layer}", perm=[0, 2, 1, 3])

    def turn(kind: str, count: int) -> str:
        return writer.node(
            "RotaryEmbedding", heads(kind, count), "cos", "sin", "positions", out=f"{kind}_turned_{layer}"
        )

    def cached(kind: str, new: str) -> str:
        past, present = f"past_{kind}_{layer}", f"present_{kind}_{layer}"
        return writer.node("TensorScatter", past, new, "write_index", out=present, axis=2, mode="linear")

    query, key, value = turn("query", HEADS), cached("key", turn("key", KV_HEADS)), cached("value", heads("value", 2))
    mixed = writer.node(
        "Attention", query, key, value, "", "", "", "kv_len", out=f"mixed_{layer}", is_causal=1, scale=1.0
    )
    mixed = writer.node("Transpose", mixed, out=f"mixed_back_{layer}", perm=[0, 2, 1, 3])
    shape = writer.constant(f"joined_shape_{layer}", np.array([0, 0, HIDDEN]))
    mixed = writer.node("Reshape", mixed, shape, out=f"joined_{layer}")
    mixed = writer.node("MatMul", mixed, writer.weight(f"out_weight_{layer}", HIDDEN, HIDDEN), out=f"out_{layer}")
    return writer.node("Add", hidden, mixed, out=f"hidden_{layer}")

"""The ONNX step graph: names of its files, inputs and outputs, and graph.json, which says what a reader must know.

Export and quantize write it, targets read it. One call computes one step of a batch over a linear KV cache:

    input_ids [batch, tokens]  write_index [batch]  logit_rows [rows]  past_key_0, past_value_0, past_key_1, ...
    -> logits [rows, vocab_size]  present_key_0, present_value_0, ...

past and present are [batch, kv_heads, cache_len, head_size] and meant to be bound to the same memory. Needs no torch.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)

from tritonforge.errors import InvalidCheckpoint

OPSET = 24
MODEL = "model.onnx"
DATA = "model.onnx.data"
FACTS = "graph.json"
FILES = (MODEL, DATA, FACTS)
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Layer:
    """The KV cache of one layer: `window` is how many tokens it looks back on, itself included, 0 for all of them."""

    kv_heads: int
    head_size: int
    window: int = 0


@dataclass(frozen=True)
class Graph:
    """What graph.json says. `kv_dtype` is the element type of past and present.

    `max_position_embeddings` is the context that the model was made for, 0 where that is not known.
    """

    num_layers: int
    vocab_size: int
    kv_dtype: str
    layers: tuple[Layer, ...]
    max_position_embeddings: int = 0

    @classmethod
    def read(cls, folder: Path) -> "Graph":
        """The facts of the graph in `folder`; InvalidCheckpoint when the file is missing or not one of these."""
        path = folder / FACTS
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format") != "onnx":
                raise ValueError("format")
            layers = tuple(Layer(**layer) for layer in values.pop("layers"))
            graph = cls(layers=layers, **values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidCheckpoint(f"{path} does not describe an ONNX step graph: {error!r}") from None
        if graph.num_layers != len(layers):
            raise InvalidCheckpoint(
                f"num_layers of {path} must be {len(layers)}, as many as layers, got {graph.num_layers}"
            )
        return graph

    def write(self, folder: Path) -> None:
        """Write graph.json."""
        text = json.dumps({"format": "onnx", **asdict(self)}, indent=2)
        (folder / FACTS).write_text(text + "\n", encoding="utf-8")

    def cache_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of the keys and values of one token over all layers, at `itemsize` bytes an element."""
        return sum(2 * layer.kv_heads * layer.head_size for layer in self.layers) * itemsize


def cache_names(kind: str, num_layers: int) -> list[str]:
    """Names of the caches of all layers in order; `kind` is past or present."""
    return [f"{kind}_{part}_{layer}" for layer in range(num_layers) for part in ("key", "value")]


def input_names(num_layers: int) -> list[str]:
    """Names of the graph's inputs in order."""
    return ["input_ids", "write_index", "logit_rows", *cache_names("past", num_layers)]


def output_names(num_layers: int) -> list[str]:
    """Names of the graph's outputs in order."""
    return ["logits", *cache_names("present", num_layers)]


def tensor_bytes(folder: Path) -> dict[str, int]:
    """Bytes of the graph's stored tensors by element type: what an exporter or a quantizer really stored."""
    import onnx_ir

    model = onnx_ir.load(folder / MODEL)
    total: dict[str, int] = {}
    for value in model.graph.initializers.values():
        tensor: Any = value.const_value
        kind = tensor.dtype.name.lower()
        total[kind] = total.get(kind, 0) + tensor.nbytes
    return dict(sorted(total.items()))

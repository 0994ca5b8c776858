"""The linear layers of an ONNX step graph: products of a computed input and a stored matrix, and who shares an input.

Quantizers ask it what there is to quantize. The head, tied or not, and routers of experts stay as they are: see
docs/quantization.md.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tritonforge.errors import InvalidCheckpoint

ROUTING = frozenset(("Softmax", "Sigmoid", "Cast", "Reshape", "Add"))
"""What may lie between the scores of experts and the choice of the best ones."""


@dataclass(frozen=True)
class Linear:
    """One MatMul or Gemm with a stored weight [..., in, out]; of a Gemm with transB it is stored as [out, in]."""

    node: ir.Node
    transposed: bool

    @property
    def weight(self) -> ir.Value:
        """The stored matrix."""
        return self.node.inputs[1]

    @property
    def name(self) -> str:
        """The name of the stored matrix, for messages."""
        return self.weight.name

    def matrix(self) -> np.ndarray:
        """A float32 copy of the weight as [..., in, out]."""
        array = np.array(self.weight.const_value.numpy(), np.float32)
        return np.ascontiguousarray(array.T) if self.transposed else array


def find(model: ir.Model) -> list[Linear]:
    """All linear layers in the order of the graph, the head among them."""
    found = []
    for node in model.graph:
        if node.op_type not in ("MatMul", "Gemm") or node.inputs[1].const_value is None:
            continue
        if len(node.inputs[1].shape) >= 2 and node.inputs[0].const_value is None:
            transposed = node.op_type == "Gemm" and bool(_flag(node, "transB"))
            if node.op_type == "Gemm" and _flag(node, "transA"):
                raise InvalidCheckpoint(f"{node.name} transposes its input, which no quantizer here takes")
            found.append(Linear(node, transposed))
    return found


def is_head(model: ir.Model, linear: Linear) -> bool:
    """Whether a layer makes the logits, or shares its matrix with another node (a tied embedding)."""
    return len(linear.weight.uses()) > 1 or _reaches(linear.node, model.graph.outputs[0])


def is_router(linear: Linear) -> bool:
    """Whether a layer's output chooses experts: it goes to a TopK, over softmax, bias and shape at most."""
    waiting, passed = [linear.node], set()
    while waiting:
        for use in waiting.pop().outputs[0].uses():
            if use.node.op_type == "TopK":
                return True
            if use.node.op_type in ROUTING and use.node not in passed:
                passed.add(use.node)
                waiting.append(use.node)
    return False


def groups(model: ir.Model) -> list[list[Linear]]:
    """The layers to quantize, those with the same input together (query, key and value; gate and up)."""
    by_input: dict[ir.Value, list[Linear]] = {}
    for linear in find(model):
        if not is_head(model, linear) and not is_router(linear):
            by_input.setdefault(linear.node.inputs[0], []).append(linear)
    return list(by_input.values())


def _reaches(node: ir.Node, output: ir.Value) -> bool:
    """Whether only unary nodes or elementwise ones with a constant lie between a node and an output of the graph."""
    value = node.outputs[0]
    while value is not output:
        users = [use.node for use in value.uses()]
        if len(users) != 1 or sum(item is not None and item.const_value is None for item in users[0].inputs) != 1:
            return False
        value = users[0].outputs[0]
    return True


def _flag(node: ir.Node, name: str) -> int:
    attribute = node.attributes.get(name)
    return attribute.as_int() if attribute is not None else 0

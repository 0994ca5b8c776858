"""A float32 ONNX step graph in 16 bits: float16 or bfloat16, with float32 kept where 16 bits would break it.

quantize_onnx calls it last, after weights were quantized. TensorRT 11 networks are strongly typed, so the graph itself
says in which type each operation computes. Three kinds of float values are told apart:

    angle   made from positions alone (rotary embeddings): computed in float32, cast down where it meets the others
    wide    norms, softmax and what follows them until the next matrix: float32, because squares overflow float16
    narrow  everything else: matrices, caches, attention, the residual stream
"""

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

ANGLE, WIDE, NARROW = "angle", "wide", "narrow"
ALWAYS_WIDE = frozenset(
    [
        "Pow",
        "ReduceMean",
        "ReduceSum",
        "ReduceMax",
        "ReduceL2",
        "Sqrt",
        "Reciprocal",
        "Exp",
        "Log",
        "Softmax",
        "LogSoftmax",
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
    ]
)
"""Operations that lose too much in 16 bits."""
ALWAYS_NARROW = frozenset(["Gemm", "Attention", "TensorScatter", "QuantizeLinear", "DequantizeLinear"])
"""Operations on matrices and caches: the reason to have 16 bits."""
SCALING = frozenset(("Mul", "Div", "Sub"))
"""Where wide meets narrow these are wide (a norm multiplies its input); others, such as residual sums, are narrow."""
UNTYPED = frozenset(("Cast", "Shape", "Size"))
"""Their input may have any type."""
FLOATS = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


def convert(model: ir.Model, dtype: str) -> None:
    """Let `model` compute in `dtype`, float16 or bfloat16; caches take that type and logits stay float32.

    The graph must be in float32. Weights beyond the range of float16 raise OverflowError.
    """
    Converter(model.graph, FLOATS[dtype]).run()


class Converter:
    """One pass over a graph in topological order; every cast and converted constant is made once."""

    def __init__(self, graph: ir.Graph, narrow: ir.DataType) -> None:
        self.graph, self.narrow = graph, narrow
        self.kinds: dict[ir.Value, str] = {}
        self.made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def run(self) -> None:
        """Convert inputs, nodes, then outputs."""
        for value in self.graph.inputs:
            if is_float(value):
                self.kinds[value] = NARROW
                value.dtype = self.narrow
        for node in list(self.graph):
            self._convert_node(node)
        for index, value in enumerate(self.graph.outputs):
            if self.kinds.get(value) == NARROW and value.name == "logits":
                value.name = "logits_narrow"
                self.graph.outputs[index] = self._cast(value, ir.DataType.FLOAT, value.producer(), name="logits")

    def _convert_node(self, node: ir.Node) -> None:
        kind = self._decide(node)
        want = self.narrow if kind == NARROW else ir.DataType.FLOAT
        for index, value in enumerate(node.inputs):
            if value is None or not is_float(value) or node.op_type in UNTYPED:
                continue
            if value.const_value is not None:
                node.replace_input_with(index, self._constant(value, want))
            elif value.dtype != want:
                node.replace_input_with(index, self._cast(value, want, node, before=True))
        for value in node.outputs:
            if is_float(value):
                self.kinds[value] = kind
                value.dtype = want

    def _decide(self, node: ir.Node) -> str:
        """The kind of the float values that `node` makes."""
        computed = [value for value in node.inputs if value is not None and value in self.kinds]
        kinds = {self.kinds[value] for value in computed}
        matrix = node.op_type == "MatMul" and is_weight(node.inputs[1])
        table = node.op_type == "Gather" and is_weight(node.inputs[0])
        if node.op_type in ALWAYS_NARROW or matrix or table:
            return NARROW
        if kinds <= {ANGLE}:
            return ANGLE
        if node.op_type in ALWAYS_WIDE or kinds <= {ANGLE, WIDE}:
            return WIDE
        return WIDE if WIDE in kinds and node.op_type in SCALING else NARROW

    def _constant(self, value: ir.Value, want: ir.DataType) -> ir.Value:
        """The constant `value` in type `want`."""
        if value.dtype == want:
            return value
        if (value, want) not in self.made:
            exact = value.const_value.numpy()
            with np.errstate(over="ignore"):
                rounded = exact.astype(want.numpy())
            if np.isinf(rounded.astype(np.float32)).sum() > np.isinf(exact).sum():
                raise OverflowError(f"{value.name} has weights beyond the range of {want.name.lower()}")
            self.made[value, want] = constant(self.graph, f"{value.name}_{want.name.lower()}", rounded)
        return self.made[value, want]

    def _cast(
        self, value: ir.Value, want: ir.DataType, at: ir.Node, *, before: bool = False, name: str = ""
    ) -> ir.Value:
        """`value` cast to `want`; the first to ask places the node beside `at`."""
        if (value, want) not in self.made or name:
            cast = ir.node("Cast", [value], {"to": want.value}, name=f"{value.name}/Cast_{want.name.lower()}")
            out = cast.outputs[0]
            out.name, out.type, out.shape = (
                name or f"{value.name}_{want.name.lower()}",
                ir.TensorType(want),
                value.shape,
            )
            (self.graph.insert_before if before else self.graph.insert_after)(at, cast)
            self.made[value, want] = out
        return self.made[value, want]


def drop_unused(graph: ir.Graph) -> None:
    """Forget stored tensors that no node reads any more."""
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]


def is_float(value: ir.Value) -> bool:
    """Whether a value is of a type that this module converts."""
    return value.dtype in FLOATS.values()


def is_weight(value: ir.Value) -> bool:
    """Whether a value is a matrix (or a stack of them) that the file stores, plain or behind its DequantizeLinear."""
    node = value.producer()
    if node is not None and node.op_type == "DequantizeLinear":
        return is_weight(node.inputs[0])
    return value.const_value is not None and len(value.shape) >= 2 and min(value.shape[-2:]) > 1


def constant(graph: ir.Graph, name: str, array: np.ndarray | ir.TensorProtocol) -> ir.Value:
    """A new stored tensor of `graph` under a name that is free."""
    taken: Iterable[str] = graph.initializers
    unique, count = name, 2
    while unique in taken:
        unique, count = f"{name}_{count}", count + 1
    tensor = ir.tensor(array, name=unique)
    value = ir.Value(name=unique, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value

"""Quantization of ONNX step graphs. If a test here failed, an engine would compute with other weights than were chosen,
or a layer would be scaled on one side only, or a release would be called int4 whose weights were left alone."""

from pathlib import Path

import numpy as np
import onnx_convert
import onnx_graph
import onnx_ir as ir
import onnx_linears
import onnx_qdq as qdq
import onnx_scaling as scaling
import pytest
import quantize_onnx
from onnx_calibrate import Seen, collect, open_session, prefill_inputs
from recipe import Weights

from tritonforge.errors import InvalidCheckpoint, InvalidRecipe

GROUP = 32
FEEDS_NARROW = {"float16": np.float16, "float32": np.float32}


@pytest.fixture(scope="session")
def step_graph(tmp_path_factory) -> Path:
    """The float32 step graph of a tiny random Llama whose head is tied to its embedding."""
    import export_onnx
    import torch
    from tiny_checkpoint import SIZES
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=True)).eval()
    folder = tmp_path_factory.mktemp("step-graph")
    export_onnx.write(model, folder)
    return folder


@pytest.fixture(scope="session")
def samples() -> list[list[int]]:
    draw = np.random.default_rng(7)
    return [draw.integers(3, 320, 48).tolist() for _ in range(4)]


def logits_of(folder: Path, ids: list[int]) -> np.ndarray:
    """Logits [tokens, vocab] of a whole sequence."""
    graph = onnx_graph.Graph.read(folder)
    inputs = prefill_inputs(graph, ids)
    cache = FEEDS_NARROW[graph.kv_dtype]
    inputs = {name: value.astype(cache) if name.startswith("past") else value for name, value in inputs.items()}
    inputs["logit_rows"] = np.arange(len(ids))
    return open_session(folder, []).run(["logits"], inputs)[0]


def saved(model: ir.Model, source: Path, folder: Path) -> Path:
    """A changed float32 model in a folder of its own."""
    ir.save(model, folder / onnx_graph.MODEL, external_data=onnx_graph.DATA)
    onnx_graph.Graph.read(source).write(folder)
    return folder


def shrunk(source: Path, out: Path, samples, precision: str, method: str = "", kv: str = "f16", group=GROUP) -> Path:
    weights = Weights(precision=precision, method=method, group_size=group)
    quantize_onnx.shrink(source, weights, kv, samples, out)
    return out


def matrix(rows: int = 96, columns: int = 24, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def matrix_types(model: ir.Model) -> dict[str, np.dtype]:
    """{name of a stored matrix: its type} of all linear layers, behind DequantizeLinear too."""
    found = {}
    for node in model.graph:
        if node.op_type in ("MatMul", "Gemm"):
            value, maker = node.inputs[1], node.inputs[1].producer()
            value = maker.inputs[0] if maker is not None and maker.op_type == "DequantizeLinear" else value
            if value.const_value is not None:
                found[value.name] = value.dtype.numpy()
    return found


# Arrays


@pytest.mark.parametrize("compute", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("seed", range(4))
def test_no_weight_moves_by_more_than_half_a_step(compute, seed):
    values = matrix(seed=seed) * 10.0 ** np.random.default_rng(seed).integers(-3, 3)
    columns = qdq.quantize_columns(values, "int8", compute)
    blocks = qdq.quantize_blocks(values, GROUP, compute)
    # A scale rounded down to 16 bits clips the largest weight by the rounding: 2^-8 of it for bfloat16.
    rounding = {"float32": 1e-6, "float16": 2.0**-11, "bfloat16": 2.0**-8}[compute]
    for quantized, step in ((columns, columns.scale), (blocks, np.repeat(blocks.scale, GROUP, axis=0))):
        missed = np.abs(quantized.dequantized() - values)
        assert (missed <= np.maximum(step * 0.5001, np.abs(values) * rounding)).all()


def test_golden_values_of_each_grid():
    column = np.array([[0.7], [-0.7], [0.25], [0.05], [0.0], [-0.16]], np.float32)
    int4 = qdq.quantize_blocks(column, 6, "float32")
    assert int4.values.astype(int)[:, 0].tolist() == [7, -7, 2, 0, 0, -2]  # 0.25 / 0.1 is a tie and goes to even
    assert int4.scale[0].tolist() == pytest.approx([0.1])
    int8 = qdq.quantize_columns(np.array([[1.27], [-0.5], [0.004]], np.float32), "int8", "float32")
    assert int8.values[:, 0].tolist() == [127, -50, 0]
    fp8 = qdq.quantize_tensor(np.array([[448.0, 17.5, -3.1, 0.002]], np.float32), "fp8", "float32")
    assert fp8.values.astype(np.float32)[0].tolist() == [448.0, 18.0, -3.0, 2.0**-9]
    assert fp8.scale == pytest.approx(1.0)


def test_a_scale_is_exact_in_the_type_that_the_graph_computes_in():
    scale = qdq.quantize_columns(matrix(), "int8", "float16").scale
    assert (scale.astype(np.float16).astype(np.float32) == scale).all()


def test_a_block_that_is_zero_stays_zero():
    values = matrix()
    values[:GROUP] = 0
    assert (qdq.quantize_blocks(values, GROUP, "float16").dequantized()[:GROUP] == 0).all()


def test_one_outlier_spoils_only_its_own_block_and_column():
    values, spoiled = matrix(), matrix()
    spoiled[GROUP, 3] = 1000
    plain, hurt = (qdq.quantize_blocks(item, GROUP, "float32").dequantized() for item in (values, spoiled))
    changed = plain != hurt
    assert changed[GROUP : 2 * GROUP, 3].any()
    changed[GROUP : 2 * GROUP, 3] = False
    assert not changed.any()


@pytest.mark.parametrize("shape", [(64, 24), (3, 64, 24)])
@pytest.mark.parametrize("grid", ["int8", "int4", "fp8"])
def test_onnx_reads_axis_and_block_size_as_the_quantizer_meant_them(grid, shape, tmp_path):
    weight = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    scaled = weight * np.linspace(0.1, 5, shape[-1], dtype=np.float32)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 2, shape[-2]][-len(shape) :]))
    w = ir.Value(name="w", const_value=ir.tensor(scaled, name="w"), shape=ir.Shape(shape))
    w.type = ir.TensorType(ir.DataType.FLOAT)
    node = ir.node("MatMul", [x, w], name="product")
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[w], opset_imports={"": 24}, name="g")
    quantized = {
        "int8": lambda: qdq.quantize_columns(scaled, "int8", "float32"),
        "int4": lambda: qdq.quantize_blocks(scaled, GROUP, "float32"),
        "fp8": lambda: qdq.quantize_tensor(scaled, "fp8", "float32"),
    }[grid]()
    qdq.store_weight(graph, onnx_linears.Linear(node, transposed=False), quantized)
    onnx_convert.drop_unused(graph)
    ir.save(ir.Model(graph, ir_version=10), tmp_path / onnx_graph.MODEL)
    rows = shape[0] if len(shape) == 3 else 5
    given = np.random.default_rng(4).normal(size=(rows, 2, shape[-2])[-len(shape) :]).astype(np.float32)
    [found] = open_session(tmp_path, []).run(["y"], {"x": given})
    np.testing.assert_allclose(found, given @ quantized.dequantized(), rtol=1e-4, atol=1e-3)


# Searches


def outlier_input(channels: int = 96, outlier: int = 5, size: float = 60) -> Seen:
    rows = np.random.default_rng(2).normal(size=(256, channels)).astype(np.float32)
    rows[:, outlier] *= size
    seen = Seen(np.zeros(channels, np.float32), np.zeros(channels))
    seen.add(rows, 256)
    return seen


def test_awq_rounds_better_than_nearest_where_one_channel_carries_most():
    seen, weight = outlier_input(), matrix()
    chosen = scaling.search_awq(seen, [weight], GROUP, "float32")

    def error(factors):
        rounded = qdq.quantize_blocks(weight * factors[:, None], GROUP, "float32").dequantized() / factors[:, None]
        return np.square(seen.rows @ (rounded - weight)).sum()

    assert chosen.alpha > 0
    assert error(chosen.factors) < 0.5 * error(np.ones(96, np.float32))


def test_smoothing_makes_int8_inputs_with_an_outlier_channel_finer():
    seen, weight = outlier_input(), matrix()
    chosen = scaling.search_smooth(seen, [weight], "float32")
    assert chosen.alpha > 0
    assert (seen.largest / chosen.factors).max() < 0.5 * seen.largest.max()


def test_factors_of_smoothquant_are_those_of_its_equation():
    found = scaling.smooth_factors(np.array([16.0, 1.0]), np.array([1.0, 0.25]), 0.5)
    assert found.tolist() == pytest.approx([4.0, 2.0])


def test_factors_of_awq_leave_even_channels_alone():
    assert scaling.awq_factors(np.full(8, 3.0), 0.7).tolist() == pytest.approx([1.0] * 8)
    assert (scaling.awq_factors(np.array([1.0, 9.0]), 0.0) == 1).all()


def test_clipping_never_makes_a_block_worse():
    rows, weight = outlier_input().rows, matrix()
    clips = scaling.search_clips(rows, weight, GROUP, "float32")

    def errors(parts):
        missed = qdq.quantize_blocks(weight, GROUP, "float32", parts).dequantized() - weight
        return [np.square(rows[:, at : at + GROUP] @ missed[at : at + GROUP]).sum() for at in range(0, 96, GROUP)]

    assert all(cut <= plain for cut, plain in zip(errors(clips), errors(np.ones_like(clips)), strict=True))


# Graphs


def test_scaling_leaves_the_float_function_unchanged(step_graph, samples, tmp_path):
    model = ir.load(step_graph / onnx_graph.MODEL)
    draw = np.random.default_rng(0)
    for group in onnx_linears.groups(model):
        channels = group[0].matrix().shape[0]
        scaling.apply(model.graph, group, np.exp(draw.normal(size=channels)).astype(np.float32))
    onnx_convert.drop_unused(model.graph)
    changed = logits_of(saved(model, step_graph, tmp_path), samples[0])
    np.testing.assert_allclose(changed, logits_of(step_graph, samples[0]), atol=2e-4)


def test_a_norm_takes_the_division_and_only_where_it_serves_these_layers_alone(step_graph):
    model = ir.load(step_graph / onnx_graph.MODEL)
    before = sum(node.op_type == "Mul" for node in model.graph)
    groups = onnx_linears.groups(model)
    for group in groups:
        scaling.apply(model.graph, group, np.full(group[0].matrix().shape[0], 2.0, np.float32))
    added = sum(node.op_type == "Mul" for node in model.graph) - before
    assert (len(groups), added) == (8, 4)  # of each layer's four inputs two come from a norm


def test_layers_that_share_an_input_are_found_together(step_graph):
    model = ir.load(step_graph / onnx_graph.MODEL)
    assert [len(group) for group in onnx_linears.groups(model)] == [3, 1, 2, 1] * 2


def test_calibration_sees_every_token_and_the_largest_magnitudes(step_graph, samples):
    model = ir.load(step_graph / onnx_graph.MODEL)
    name = onnx_linears.groups(model)[0][0].node.inputs[0].name
    seen = collect(step_graph, [name], samples)[name]
    assert seen.tokens == sum(map(len, samples))
    assert (seen.largest >= np.abs(seen.rows).max(axis=0)).all()
    assert (seen.mean <= seen.largest).all()
    with pytest.raises(ValueError, match="at least one sample"):
        collect(step_graph, [name], [])


STORED = {
    ("int8", ""): "int8",
    ("int4", "rtn"): "int4",
    ("int4", "awq"): "int4",
    ("w8a8", ""): "int8",
    ("w8a8", "rtn"): "int8",
    ("fp8", ""): "float8_e4m3fn",
}


@pytest.mark.parametrize(("precision", "method"), STORED)
def test_every_matrix_is_stored_as_promised_and_the_tied_head_once(precision, method, step_graph, samples, tmp_path):
    out = shrunk(step_graph, tmp_path, samples, precision, method)
    model = ir.load(out / onnx_graph.MODEL)
    types = matrix_types(model)
    head = [name for name in types if name.startswith("lm_head")]
    assert len(head) == 1 and types.pop(head[0]) == np.float16
    assert len(types) == 14 and {str(kind) for kind in types.values()} == {STORED[precision, method]}
    table = model.graph.initializers[head[0]]
    assert sorted(use.node.op_type for use in table.uses()) == ["Gather", "Gemm"]
    stored = [value for value in model.graph.initializers.values() if value.const_value.size == table.const_value.size]
    assert stored == [table]


@pytest.mark.parametrize(
    ("precision", "method", "far"),
    [
        ("fp16", "", 0.01),
        ("int8", "", 0.05),
        ("w8a8", "", 0.1),
        ("fp8", "", 0.2),
        ("int4", "rtn", 0.5),
        ("int4", "awq", 0.4),
    ],
)
def test_logits_stay_near_those_of_float32(precision, method, far, step_graph, samples, tmp_path):
    exact = logits_of(step_graph, samples[0])
    found = logits_of(shrunk(step_graph, tmp_path, samples, precision, method), samples[0])
    assert found.dtype == np.float32
    assert np.sqrt(np.square(found - exact).mean()) < far * exact.std()


def test_an_input_that_int8_cannot_bear_is_left_alone_and_its_weights_are_not(
    step_graph, samples, tmp_path, monkeypatch
):
    monkeypatch.setattr(quantize_onnx, "BEARABLE", 0.0)
    model = ir.load(shrunk(step_graph, tmp_path, samples, "w8a8") / onnx_graph.MODEL)
    kinds = [node.op_type for node in model.graph]
    assert (kinds.count("QuantizeLinear"), kinds.count("DequantizeLinear")) == (0, 14)


def test_inputs_and_outputs_keep_their_names_order_and_symbols(step_graph, samples, tmp_path):
    before = ir.load(step_graph / onnx_graph.MODEL).graph
    after = ir.load(shrunk(step_graph, tmp_path, samples, "int4") / onnx_graph.MODEL).graph
    for old, new in zip((*before.inputs, *before.outputs), (*after.inputs, *after.outputs), strict=True):
        assert (old.name, old.shape) == (new.name, new.shape)
        cache = old.name.startswith(("past", "present"))
        assert new.dtype == (ir.DataType.FLOAT16 if cache else old.dtype)
    assert onnx_graph.Graph.read(tmp_path).kv_dtype == "float16"


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_norms_and_angles_stay_in_float32(compute, step_graph):
    model = ir.load(step_graph / onnx_graph.MODEL)
    onnx_convert.convert(model, compute)
    kinds: dict[str, set] = {}
    for node in model.graph:
        kinds.setdefault(node.op_type, set()).add(node.outputs[0].dtype)
        floats = {value.dtype for value in node.inputs if value is not None and onnx_convert.is_float(value)}
        assert len(floats) <= 1, f"{node.name} mixes {floats}: TensorRT networks are strongly typed"
    narrow = onnx_convert.FLOATS[compute]
    wide = {ir.DataType.FLOAT}
    assert all(kinds[name] == wide for name in ("Pow", "ReduceMean", "Sqrt", "Reciprocal", "Cos", "Sin"))
    assert kinds["Attention"] == kinds["TensorScatter"] == {narrow}
    assert all(
        node.outputs[0].dtype == narrow
        for node in model.graph
        if onnx_convert.is_weight(node.inputs[-1] or node.inputs[0])
    )


def test_a_float32_cache_lets_the_graph_compute_in_float32(step_graph, samples, tmp_path):
    out = shrunk(step_graph, tmp_path, samples, "int4", "rtn", kv="f32")
    assert set(onnx_graph.tensor_bytes(out)) == {"float", "int4", "int64"}
    assert logits_of(out, samples[0]).shape == (48, 320)


# Refusals


def test_weights_left_alone_are_refused_by_name(step_graph):
    model = ir.load(step_graph / onnx_graph.MODEL)
    first = onnx_linears.groups(model)[0]
    quantize_onnx.int8(model.graph, first[:2], "float16")
    with pytest.raises(InvalidCheckpoint, match=r"left 12 matrices alone: .*v_proj"):
        quantize_onnx.check_quantized(model, "int8")


@pytest.mark.parametrize(
    ("weights", "kv", "says"),
    [
        (
            {"precision": "int8", "method": "awq"},
            "f16",
            "weights.method must be rtn with weights.precision int8, got 'awq'",
        ),
        ({"precision": "fp16", "method": "rtn"}, "f16", "weights.method must be absent with weights.precision fp16"),
        ({"precision": "int4"}, "fp8", "kv_cache.precision must be one of f32, f16, bf16 for ONNX, got 'fp8'"),
        ({"precision": "int4"}, "int8", "KVCacheUpdate takes no 8-bit cache"),
        ({"precision": "bf16"}, "f16", "kv_cache.precision must be bf16 with weights.precision bf16, got 'f16'"),
    ],
)
def test_what_no_method_can_do_is_refused_by_name(weights, kv, says):
    with pytest.raises(InvalidRecipe) as refused:
        quantize_onnx.plan(Weights(**weights), kv)
    assert says in str(refused.value)


def test_a_group_size_that_does_not_divide_a_matrix_is_refused(step_graph, samples, tmp_path):
    with pytest.raises(InvalidRecipe, match=r"group_size must divide the 64 inputs of .*q_proj.*, got 48"):
        shrunk(step_graph, tmp_path, samples, "int4", "rtn", group=48)


def test_a_weight_beyond_float16_is_refused_by_name_and_bfloat16_takes_it(step_graph, samples, tmp_path):
    model = ir.load(step_graph / onnx_graph.MODEL)
    linear = onnx_linears.groups(model)[0][0]
    large = linear.matrix()
    large[0, 0] = 1e6
    linear.weight.const_value = ir.tensor(large, name=linear.name)
    source = tmp_path / "large"
    source.mkdir()
    saved(model, step_graph, source)
    with pytest.raises(InvalidCheckpoint, match=r"q_proj.* beyond the range of float16"):
        shrunk(source, tmp_path, samples, "fp16")
    shrunk(source, tmp_path, samples, "bf16", kv="bf16")


def test_a_graph_that_is_not_float32_is_refused(step_graph, samples, tmp_path):
    half = tmp_path / "half"
    half.mkdir()
    shrunk(step_graph, half, samples, "fp16")
    with pytest.raises(InvalidCheckpoint, match="must be float32, got float16"):
        shrunk(half, tmp_path, samples, "int8")


ROUTER = """
<ir_version: 10, opset_import: ["" : 24]>
moe (float[n, 64] x) => (float[n, 2] best, float[n, 32] out)
<float[64, 8] router = {ROUTER}, float[64, 32] expert = {EXPERT}>
{
    scores = MatMul(x, router)
    parts = Softmax(scores)
    k = Constant<value_ints = [2]>()
    best, which = TopK(parts, k)
    out = MatMul(x, expert)
}
"""


def test_a_router_is_left_alone_and_an_expert_is_not():
    zeros = {"ROUTER": 64 * 8, "EXPERT": 64 * 32}
    text = ROUTER
    for name, count in zeros.items():
        text = text.replace("{" + name + "}", "{" + ",".join(["0"] * count) + "}")
    model = ir.from_onnx_text(text)
    routers = [onnx_linears.is_router(linear) for linear in onnx_linears.find(model)]
    assert routers == [True, False]

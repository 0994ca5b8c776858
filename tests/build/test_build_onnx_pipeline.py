"""A recipe for the onnxruntime target, from checkpoint to release; what the path does not offer is refused before work.

If these failed, a release could hold another model's graph, or a build could end late over what was known at once.
"""

import dataclasses
import json

import checkout
import export
import export_onnx
import onnx
import onnx_graph
import pytest
import quantize
import stage
import torch
from onnx_sessions import Slots
from recipe import Checkpoint, Compile, KVCache, Quality, Recipe, Weights
from test_build_onnx_export import expected_logits, sequences, tiny_model
from test_build_pipeline import LIMITS, build
from tiny_checkpoint import SIZES, write_checkpoint

from tritonforge.errors import InvalidCheckpoint, InvalidRecipe, ReleaseMismatch

SHIPPED = Recipe.load(checkout.RECIPES / "smollm2-135m-onnxruntime.toml")


def tiny_recipe(source, **sections) -> Recipe:
    """The shipped recipe for a tiny checkpoint."""
    cache = KVCache(precision="f32", slots=4, block_size=LIMITS.max_model_len)
    values = {"name": "tiny-onnx", "checkpoint": Checkpoint(source=str(source)), "kv_cache": cache, "limits": LIMITS}
    return dataclasses.replace(SHIPPED, **{**values, **sections})


@pytest.fixture(scope="module")
def shared_work(tmp_path_factory):
    """A folder of stages for tests of one checkpoint: its export is made once."""
    return tmp_path_factory.mktemp("work")


def test_a_recipe_becomes_a_release_whose_graph_says_what_float32_said(tiny, tmp_path, shared_work):
    release = build(tiny_recipe(tiny), tmp_path, work=shared_work)
    release.verify()
    sizes, decoder = release.manifest["sizes"], release.model_repository / "decoder/1"
    assert release.manifest["quality"]["mean_kl"] < 1e-6
    config = json.loads((decoder / "decoder.json").read_text())
    assert (config["engine"], config["engine_config"]["num_blocks"]) == ("onnxruntime", 4)
    assert config["engine_config"]["block_size"] == LIMITS.max_model_len
    graph = onnx_graph.Graph.read(decoder / "engine")
    assert graph.layers == (onnx_graph.Layer(kv_heads=2, head_size=16),) * 2
    assert sizes["kv_cache"]["bytes_per_block"] == 2 * 2 * 2 * 16 * 4 * 1088, "1024 tokens and 64 for padding"
    assert sizes["memory"]["weight_bytes"] == (decoder / "engine" / onnx_graph.DATA).stat().st_size
    again = build(tiny_recipe(tiny), tmp_path, force=("quantize", "compile", "assemble"), work=shared_work)
    assert again.digest == release.digest


@pytest.mark.parametrize(("precision", "largest"), [("fp16", 0.51), ("int8", 0.36), ("w8a8", 0.36), ("int4", 0.28)])
def test_weights_get_smaller_and_stay_close(tiny, tmp_path, shared_work, precision, largest):
    """Random weights are the worst case for int4: the limit here only catches a broken graph."""
    cache = KVCache(precision="f16", slots=4, block_size=LIMITS.max_model_len)
    quality = Quality(max_perplexity_ratio=1.3, max_mean_kl=0.3, min_top1_agreement=0.3)
    recipe = tiny_recipe(tiny, weights=Weights(precision=precision), kv_cache=cache, quality=quality)
    release = build(recipe, tmp_path, work=shared_work)
    sizes = release.manifest["sizes"]
    assert sizes["weight_bytes"] < largest * sizes["weight_bytes_float32"]
    assert onnx_graph.Graph.read(release.model_repository / "decoder/1/engine").kv_dtype == "float16"


def test_formats_do_not_mix(tiny, tmp_path):
    """The OpenVINO export of a checkpoint is not taken for its ONNX export."""
    located = export.checkpoint.locate(str(tiny))
    assert export.folder_of(located, "onnx") != export.folder_of(located, "openvino")
    done = stage.run_stage(export.plan_stage(located, "openvino"), tmp_path / "export", lambda _folder: {})
    with pytest.raises(ReleaseMismatch, match=r"in format openvino, the onnxruntime target .* takes onnx"):
        quantize.quantize(done, tiny_recipe(tiny), tmp_path / "quantize")


def test_tied_weights_are_stored_once(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=True)
    values = sum(parameter.numel() for parameter in model.parameters())
    export_onnx.write(model, tmp_path)
    assert (tmp_path / onnx_graph.DATA).stat().st_size < values * 4 + 16_384
    stored = onnx_graph.tensor_bytes(tmp_path)
    assert values * 4 <= stored["float"] < values * 4 + 4096, "a copy of the head would be 81,920 bytes"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_stored_in_half_the_bytes(dtype, tmp_path):
    """float16 also runs in ONNX Runtime; bfloat16, which has no kernels on CPUs there, must be a valid file."""
    model = tiny_model("llama", dtype)
    (ids,) = sequences(20)
    wanted = expected_logits(model.float(), ids)
    graph = export_onnx.write(model.to(getattr(torch, dtype)), tmp_path)
    assert graph.kv_dtype == dtype and onnx_graph.Graph.read(tmp_path) == graph
    onnx.checker.check_model(tmp_path / onnx_graph.MODEL, full_check=True)
    stored = onnx_graph.tensor_bytes(tmp_path)
    assert stored[dtype] >= 2 * sum(one.numel() for one in model.parameters()) and stored.get("float", 0) < 1024
    if dtype == "float16":
        logits = Slots(tmp_path, 1, 48).step(ids[None], [0], list(range(20)))
        assert abs(logits - wanted).max() < 0.02 * abs(wanted).max()


def test_only_standard_operators_and_nothing_of_this_machine_is_in_the_file(tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        export_onnx.write(tiny_model("mistral"), tmp_path / folder)
    content = [(tmp_path / folder / onnx_graph.MODEL).read_bytes() for folder in ("first", "second")]
    assert content[0] == content[1], "two exports of a model are the same"
    assert str(checkout.ROOT).encode() not in content[0] and b"site-packages" not in content[0]
    model = onnx.load(tmp_path / "first" / onnx_graph.MODEL, load_external_data=False)
    assert [(item.domain, item.version) for item in model.opset_import] == [("", 24)] and not model.functions
    assert [item.name for item in model.graph.input] == onnx_graph.input_names(2)
    assert [item.name for item in model.graph.output] == onnx_graph.output_names(2)
    dims = [[dim.dim_param or dim.dim_value for dim in item.type.tensor_type.shape.dim] for item in model.graph.input]
    assert dims[:4] == [["batch", "tokens"], ["batch"], ["rows"], ["batch", 2, "cache_len", 16]]
    names = {item.name for item in model.graph.initializer}
    assert {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)} <= names
    assert onnx_graph.Graph.read(tmp_path / "first").layers[0].window == 8


REFUSED = {
    "t5": ({}, "t5 has an encoder"),
    "mamba": ({}, "each of its 2 layers must keep a KV cache of its own"),
    "jamba": ({"num_experts": 2}, "layers with a recurrent state are not offered"),
    "gpt_oss": ({}, "attention of layer 0 takes s_aux, which ONNX's Attention has no input for"),
    "deepseek_v3": ({}, "must have keys and values of one size, got 192 and 128"),
    "bloom": ({}, "its attention cannot be replaced"),
    "granitemoe": ({}, "its step cannot be traced without values"),
    "phi3": (
        {
            "num_key_value_heads": 4,
            "original_max_position_embeddings": 1024,
            "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        },
        "its step cannot be traced without values",
    ),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_an_architecture_needs_and_the_path_lacks_is_refused_by_name(model_type):
    from transformers import AutoConfig

    changes, complaint = REFUSED[model_type]
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    with pytest.raises(InvalidCheckpoint, match=complaint) as caught:
        export_onnx.check(config)
    assert model_type in caught.value.args[0]


def test_an_architecture_is_refused_before_any_work(tiny, tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint", "granitemoe")
    with pytest.raises(InvalidCheckpoint, match="granitemoe cannot be exported to ONNX"):
        build(tiny_recipe(folder), tmp_path)
    assert not (tmp_path / "work").exists()


def test_a_model_that_counts_positions_itself_is_refused_by_its_logits(tmp_path):
    """Its attention takes positions from the tokens of the call: right for a whole sequence, wrong for a chunk."""
    model = tiny_model("llama")
    rotary = model.model.rotary_emb.forward

    def count(hidden, position_ids):
        return rotary(hidden, torch.arange(hidden.shape[1])[None])

    model.model.rotary_emb.forward = count
    with pytest.raises(InvalidCheckpoint, match="in chunks over a linear KV cache it must give the logits"):
        export_onnx.write(model, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"weights": Weights(precision="fp8")}, "weights.precision must be one of .* onnxruntime target, got 'fp8'"),
        ({"kv_cache": KVCache(precision="u8", slots=4)}, "kv_cache.precision must be one of f32, f16"),
        ({"compile": Compile(target="onnxruntime", properties={"threads": 2})}, "threads must be one of intra_op"),
        (
            {"compile": Compile(target="onnxruntime", properties={"intra_op_num_threads": -1})},
            r"intra_op_num_threads must be in \[0, 4096\], got -1",
        ),
        (
            {"compile": Compile(target="onnxruntime", properties={}, prefill_properties={"a": 1})},
            "compile.prefill_properties must not be given",
        ),
        ({"limits": dataclasses.replace(LIMITS, max_model_len=4096)}, "max_position_embeddings"),
    ],
)
def test_a_recipe_that_onnxruntime_cannot_run_is_refused_before_any_work(tiny, tmp_path, section, complaint):
    with pytest.raises(InvalidRecipe, match=complaint):
        build(tiny_recipe(tiny, **section), tmp_path)
    assert not (tmp_path / "work").exists()

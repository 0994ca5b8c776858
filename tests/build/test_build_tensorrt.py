"""Real TensorRT engines, built here without a GPU. None of them is run: that needs one.

A tiny model is built always. The SmolLM2 engines in four precisions are a slow target of their own,
`make test-slow`: their sizes show that quantized weights are so in the engine too.
"""

import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import checkout
import onnx_graph
import pytest
import target_tensorrt as target
import tensorrt_builder
from recipe import Checkpoint, Recipe, Weights

from tritonforge.decoder import DecoderConfig, load_engine
from tritonforge.engines.tensorrt import TensorRTEngine
from tritonforge.engines.tensorrt_identity import ENGINE, Identity
from tritonforge.engines.tensorrt_plan import profiles
from tritonforge.errors import EngineFailure, InvalidCheckpoint, InvalidRecipe, ReleaseMismatch, SetupError
from tritonforge.memory.plan import MemoryPlan

pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx, which builds without a GPU")

SLOTS, CONTEXT, CHUNK = 4, 128, 64
BUILT_FOR = ("8.6", "8.9", "12.0")
NO_DRIVER = not Path("/dev/nvidiactl").exists()


def write_graph(model_type: str, folder: Path, dtype: str = "float16") -> onnx_graph.Graph:
    """The step graph of a random model of two layers."""
    import export_onnx
    from test_build_onnx_export import tiny_model

    folder.mkdir(parents=True, exist_ok=True)
    export_onnx.write(tiny_model(model_type, dtype), folder)
    return onnx_graph.Graph.read(folder)


def tiny_recipe(**compile_fields) -> Recipe:
    return Recipe.from_dict(
        {
            "name": "tiny-tensorrt",
            "checkpoint": {"source": "hub:owner/name"},
            "weights": {"precision": "fp16"},
            "kv_cache": {"precision": "f16", "slots": SLOTS},
            "limits": {
                "max_model_len": CONTEXT,
                "max_num_seqs": SLOTS,
                "max_num_batched_tokens": CHUNK,
                "max_waiting": 4,
                "max_waiting_tokens": 4096,
            },
            "compile": {
                "target": "tensorrt",
                "properties": {},
                "compute_capabilities": list(BUILT_FOR),
                **compile_fields,
            },
            "quality": {"max_perplexity_ratio": 1.05, "max_mean_kl": 0.05, "min_top1_agreement": 0.9},
        }
    )


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    write_graph("llama", folder)
    return folder


@pytest.fixture(scope="module")
def engine_dir(graph, tmp_path_factory) -> Path:
    """The built engine of the tiny Llama; tests only read it."""
    folder = tmp_path_factory.mktemp("compiled") / "engine"
    recipe = tiny_recipe()
    target.check_tools(recipe)
    target.place(graph, folder, recipe)
    return folder


def test_a_real_engine_is_built_with_its_identity_log_and_inspection(engine_dir):
    identity = Identity.read(engine_dir)
    assert (identity.flavour, identity.compute_capabilities) == ("tensorrt_rtx", BUILT_FOR)
    assert identity.engine_bytes == (engine_dir / ENGINE).stat().st_size > identity.weight_bytes
    assert (identity.slots, identity.max_model_len, identity.cache_len) == (SLOTS, CONTEXT, 192)
    assert identity.profiles == profiles(SLOTS, CONTEXT, CHUNK)
    inspection = json.loads((engine_dir / tensorrt_builder.INSPECTION).read_text())
    assert inspection["network_layers"] == identity.layer_counts
    assert inspection["tensors"]["past_key_0"] == inspection["tensors"]["present_key_0"] == ["HALF", [-1, 2, 192, 16]]
    assert inspection["tensors"]["logits"][0] == "FLOAT"
    log = (engine_dir / tensorrt_builder.LOG).read_text()
    assert "Opset version:    24" in log and str(engine_dir.parent.parent) not in log
    assert target.bytes_per_block(engine_dir, tiny_recipe()) == identity.kv_bytes // SLOTS


def test_each_layer_updates_keys_and_values_in_place_and_attends_once(engine_dir):
    counts = Identity.read(engine_dir).layer_counts
    assert (counts["KV_CACHE_UPDATE"], counts["ATTENTION_INPUT"]) == (2 * 2, 2)


def test_a_graph_that_does_not_update_its_cache_in_place_is_refused():
    with pytest.raises(EngineFailure, match=r"must have 4 layers KV_CACHE_UPDATE, 2 for each of 2 layers, it has 3"):
        tensorrt_builder.check_layers({"KV_CACHE_UPDATE": 3, "ATTENTION_INPUT": 2}, 2)
    with pytest.raises(EngineFailure, match=r"must have 2 layers ATTENTION_INPUT, 1 for each of 2 layers, it has 0"):
        tensorrt_builder.check_layers({"KV_CACHE_UPDATE": 4}, 2)


def test_a_float32_graph_is_refused_and_named(tmp_path):
    """No attention kernel takes float32: without the check TensorRT says so after it has tried."""
    write_graph("llama", tmp_path / "graph", "float32")
    with pytest.raises(InvalidRecipe, match=r"kv_cache.precision must be that of the graph \(float32\), got float16"):
        target.place(tmp_path / "graph", tmp_path / "engine", tiny_recipe())


def test_a_corrupt_graph_is_refused_by_name(graph, tmp_path):
    for name in onnx_graph.FILES:
        shutil.copyfile(graph / name, tmp_path / name)
    content = (tmp_path / onnx_graph.MODEL).read_bytes()
    (tmp_path / onnx_graph.MODEL).write_bytes(content[: len(content) // 2])
    with pytest.raises(InvalidCheckpoint, match=r"model.onnx cannot be read as an ONNX file"):
        target.place(tmp_path, tmp_path / "engine", tiny_recipe())
    (tmp_path / onnx_graph.MODEL).write_bytes(content)
    with open(tmp_path / onnx_graph.DATA, "r+b") as file:
        file.truncate(1000)
    with pytest.raises(InvalidRecipe, match="TensorRT cannot take the graph"):
        target.place(tmp_path, tmp_path / "engine-2", tiny_recipe())


def test_an_engine_larger_than_the_named_device_is_refused(graph, tmp_path):
    recipe = tiny_recipe(properties={"device_memory_mib": 1400})
    with pytest.raises(InvalidRecipe, match=r"device_memory_mib must be at least \d+, got 1400: weight"):
        target.place(graph, tmp_path / "engine", recipe)


@pytest.mark.skipif(not NO_DRIVER, reason="there is a driver")
def test_opening_an_engine_without_a_driver_is_an_error_and_not_the_end_of_the_process(engine_dir):
    config = {"vocab_size": 320, "max_model_len": CONTEXT, "block_size": CONTEXT, "num_blocks": SLOTS}
    with pytest.raises(SetupError, match="no NVIDIA driver"):
        target.open_engine(engine_dir, config)
    assert "cuda.bindings" not in sys.modules
    with pytest.raises(SetupError, match="strip_weights needs a GPU where it is built"):
        target.check_tools(tiny_recipe(properties={"strip_weights": True}))


def test_a_shortened_engine_file_is_refused_before_a_gpu_is_asked_to_read_it(engine_dir, tmp_path):
    copied = shutil.copytree(engine_dir, tmp_path / "engine")
    with open(copied / ENGINE, "r+b") as file:
        file.truncate(1000)
    with pytest.raises(ReleaseMismatch, match=r"it has 1000: the file is corrupt"):
        TensorRTEngine(copied, {}, cuda=object())


OTHERS = (("qwen3", "bfloat16"), ("gemma3_text", "float16"))


@pytest.mark.parametrize(
    "model_type, dtype",
    [("mistral", "float16"), *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)],
)
def test_other_architectures_build_too(tmp_path, model_type, dtype):
    """A query-key norm, a sliding window, and local beside global layers; bfloat16."""
    graph = write_graph(model_type, tmp_path / "graph", dtype)
    wanted = tensorrt_builder.Wanted(192, profiles(SLOTS, CONTEXT, CHUNK), ("8.9",))
    built = tensorrt_builder.build(tmp_path / "graph", wanted, graph.num_layers, tmp_path)
    assert (built.layer_counts["KV_CACHE_UPDATE"], built.layer_counts["ATTENTION_INPUT"]) == (
        2 * graph.num_layers,
        graph.num_layers,
    )


def test_a_checkpoint_becomes_a_release_with_an_engine_that_asks_for_a_gpu(tiny, tmp_path):
    """Export, quantization, quality on the CPU, engine and manifest: all but running it."""
    import release as release_script

    recipe = replace(tiny_recipe(), checkpoint=Checkpoint(source=str(tiny)), weights=Weights(precision="int8"))
    release = release_script.build(recipe, tmp_path / "work", tmp_path / "release")
    release.verify()
    assert 0.9 < release.manifest["quality"]["perplexity_ratio"] < 1.05
    cache = release.manifest["sizes"]["kv_cache"]
    folder = release.model_repository / "decoder" / "1"
    identity = Identity.read(folder / "engine")
    assert (cache["num_blocks"], cache["bytes"]) == (SLOTS, identity.kv_bytes)
    plan = MemoryPlan.of_manifest(release.manifest, 0)
    assert plan.total_bytes > identity.engine_bytes + identity.kv_bytes and plan.runtime_bytes > 0
    config = DecoderConfig.read(folder / "decoder.json")
    identity.check_config(config.engine_config)
    if NO_DRIVER:
        with pytest.raises(SetupError, match="no NVIDIA driver"):
            load_engine(config.engine, folder / "engine", config.engine_config)


LARGEST = {"fp16": (1.0, 1.0), "int8": (0.70, 0.61), "int4": (0.55, 0.44), "fp8": (0.75, 0.61)}
"""Largest parts of the float16 engine's file, and of the weights that it was built from. The file holds the source of
kernels too, 15 to 48 MB, which is much for so small a model; and a tied embedding stays in 16 bits."""


def quantized_of(recipe: Recipe) -> Path:
    """The quantized graph of a shipped recipe; stages that are made already are kept."""
    import checkpoint
    import export
    import quantize

    located = checkpoint.locate(recipe.checkpoint.source, recipe.checkpoint.sha256)
    folder = checkout.WORK / export.folder_of(located, recipe.format)
    exported = export.export(located, folder, format=recipe.format)
    return quantize.quantize(exported, recipe, checkout.WORK / f"quantize-{recipe.name}").folder


@pytest.mark.slow
def test_the_four_precisions_of_smollm2_build_in_two_minutes_each_and_shrink_as_they_should(tmp_path):
    sizes, weights = {}, {}
    for precision in LARGEST:
        recipe = Recipe.load(checkout.RECIPES / f"smollm2-135m-tensorrt-{precision}.toml")
        quantized = quantized_of(recipe)
        begin = time.monotonic()
        target.place(quantized, tmp_path / precision, recipe)
        seconds = time.monotonic() - begin
        identity = Identity.read(tmp_path / precision)
        layers = len(identity.layers)
        assert identity.layer_counts["KV_CACHE_UPDATE"] == 2 * layers == 60
        assert identity.layer_counts["ATTENTION_INPUT"] == layers
        sizes[precision], weights[precision] = identity.engine_bytes, identity.weight_bytes
        part, weight_part = sizes[precision] / sizes["fp16"], weights[precision] / weights["fp16"]
        print(
            f"{precision}: {identity.engine_bytes / 1e6:.1f} MB, {part:.3f}, weights {weight_part:.3f}, {seconds:.0f} s"
        )
        largest, largest_weights = LARGEST[precision]
        assert part <= largest and weight_part <= largest_weights and seconds < 120

"""Recipes: the shipped ones load, and every mistake is refused with the field, the value and the rule."""

import copy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build"))

import compile as compile_stage  # noqa: E402
import quality  # noqa: E402
import target_openvino  # noqa: E402
from recipe import Recipe  # noqa: E402

from tritonforge.errors import InvalidRecipe  # noqa: E402

SHIPPED = sorted((ROOT / "build/recipes").glob("*.toml"))
VALID = {
    "name": "tiny-int8",
    "checkpoint": {"source": "hub:owner/name"},
    "weights": {"precision": "int8"},
    "kv_cache": {"precision": "u8", "block_size": 32, "memory_mib": 64},
    "limits": {
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_waiting": 16,
        "max_waiting_tokens": 4096,
    },
    "compile": {"target": "openvino", "properties": {"INFERENCE_PRECISION_HINT": "f32"}},
    "quality": {"max_perplexity_ratio": 1.05, "max_mean_kl": 0.05, "min_top1_agreement": 0.9},
}
MODEL = {"num_layers": 30, "num_kv_heads": 3, "head_size": 64, "max_position_embeddings": 8192, "vocab_size": 49152}


def changed(path, value):
    """VALID with one value set, by dotted path; the value ... removes the key."""
    data = copy.deepcopy(VALID)
    *parents, last = path.split(".")
    section = data
    for name in parents:
        section = section[name]
    if value is ...:
        del section[last]
    else:
        section[last] = value
    return data


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_load_under_their_own_name_and_suit_their_target(path):
    recipe = Recipe.load(path)
    assert recipe.name == path.stem
    compile_stage.check_recipe(recipe, MODEL)


def test_the_three_precisions_are_shipped():
    recipes = [Recipe.load(path) for path in SHIPPED]
    assert {one.weights.precision for one in recipes if one.format == "openvino"} == {"bf16", "int8", "int4"}


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("colour", "red", "colour is not a key of a recipe"),
        ("weights.bits", 8, "weights.bits is not a key"),
        ("limits.max_seqs", 8, "limits.max_seqs is not a key"),
        ("name", ..., "name is missing"),
        ("limits.max_model_len", ..., "limits.max_model_len is missing"),
        ("quality", ..., "quality is missing"),
        ("quality.max_mean_kl", ..., "quality.max_mean_kl is missing"),
        ("weights", "int8", "weights must be a table, got 'int8'"),
        ("name", "Has Spaces", "name must match"),
        ("name", "../evil", "name must match"),
        ("weights.precision", "int3", "weights.precision must be one of bf16, int8, int4, fp32, .* got 'int3'"),
        ("kv_cache.precision", "i4", "kv_cache.precision must be one of"),
        (
            "weights.precision",
            "fp8",
            "weights.precision must be one of bf16, int8, int4 for the openvino target, got 'fp8'",
        ),
        ("weights.method", "gptq", "weights.method must be one of"),
        (
            "weights.method",
            "awq",
            "weights.method must not be given for int8 weights of the openvino target, got 'awq'",
        ),
        ("kv_cache.slots", 4, "kv_cache.slots must not be given for the openvino target, got 4"),
        ("kv_cache.memory_mib", ..., "kv_cache.memory_mib is missing"),
        ("compile.target", "cuda", "compile.target must be one of openvino, onnxruntime, tensorrt, got 'cuda'"),
        ("compile.target", "onnxruntime", "kv_cache.block_size must not be given for the onnxruntime target"),
        ("compile.properties", [], "compile.properties must be dict"),
        ("limits.max_num_seqs", 0, r"limits.max_num_seqs must be in \[1, 4096\], got 0"),
        ("limits.max_num_seqs", True, "limits.max_num_seqs must be int, got True"),
        ("limits.max_num_seqs", 8.0, "limits.max_num_seqs must be int, got 8.0"),
        ("limits.max_num_seqs", "8", "limits.max_num_seqs must be int, got '8'"),
        ("kv_cache.memory_mib", -1, "kv_cache.memory_mib must be in"),
        ("kv_cache.memory_mib", "much", "kv_cache.memory_mib must be int or 'auto', got 'much'"),
        ("kv_cache.memory_mib", True, "kv_cache.memory_mib must be int or 'auto', got True"),
        ("kv_cache.reserve_mib", "auto", "kv_cache.reserve_mib must be int, got 'auto'"),
        ("quality.max_mean_kl", float("nan"), "quality.max_mean_kl must be a finite number"),
        ("quality.min_top1_agreement", 1.5, "quality.min_top1_agreement must be in"),
        ("limits.max_num_batched_tokens", 4, "max_num_batched_tokens must be at least max_num_seqs"),
        ("limits.max_waiting_tokens", 512, "max_waiting_tokens must be at least max_model_len"),
    ],
)
def test_a_mistake_is_refused_with_field_value_and_rule(path, value, complaint):
    with pytest.raises(InvalidRecipe, match=complaint):
        Recipe.from_dict(changed(path, value))


LINEAR = {"compile": {"target": "onnxruntime", "properties": {}}, "kv_cache": {"precision": "f32", "slots": 8}}


def test_a_slot_of_a_linear_cache_is_one_block_as_long_as_the_context():
    recipe = Recipe.from_dict({**VALID, **LINEAR})
    assert (recipe.kv_cache.block_size, recipe.format, recipe.is_linear) == (1024, "onnx", True)


@pytest.mark.parametrize(
    ("cache", "complaint"),
    [
        ({"slots": 7}, r"kv_cache.slots must be at least limits.max_num_seqs \(8\) .* got 7"),
        ({}, "kv_cache.slots must be at least"),
        ({"slots": 8, "memory_mib": 64}, "kv_cache.memory_mib must not be given for the onnxruntime target, got 64"),
        ({"slots": 8, "block_size": 1024}, "kv_cache.block_size must not be given"),
    ],
)
def test_the_size_of_a_linear_cache_is_said_in_slots_only(cache, complaint):
    with pytest.raises(InvalidRecipe, match=complaint):
        Recipe.from_dict({**VALID, **LINEAR, "kv_cache": {"precision": "f32", **cache}})


def test_a_method_must_be_one_of_its_precision():
    def weights(precision, method):
        return Recipe.from_dict({**VALID, **LINEAR, "weights": {"precision": precision, "method": method}}).weights

    assert weights("w8a8", "smoothquant").method == "smoothquant"
    with pytest.raises(
        InvalidRecipe, match=r"weights.method must be one of awq, rtn for int4 weights .* 'smoothquant'"
    ):
        weights("int4", "smoothquant")
    with pytest.raises(InvalidRecipe, match=r"weights.method must not be given for fp32 weights"):
        weights("fp32", "rtn")


def test_memory_of_a_linear_cache_is_measured_behind_computed_tokens():
    """A slot computes only what follows its computed tokens: all slots are filled to the longest context first."""
    import engine_memory

    from tritonforge.engines.base import EngineSpec

    computed = dict.fromkeys(range(4), 0)

    class Engine:
        spec = EngineSpec(vocab_size=100, max_model_len=100, block_size=100, num_blocks=4)

        def step(self, sequences):
            assert len({sequence.block_table[0] for sequence in sequences}) == len(sequences), "a slot for each"
            for sequence in sequences:
                (slot,) = sequence.block_table
                assert sequence.num_computed_tokens <= computed[slot]
                computed[slot] = max(computed[slot], sequence.num_computed_tokens + len(sequence.token_ids))

        def copy_blocks(self, copies):
            computed.update({target: computed[source] for source, target in copies})

    engine = Engine()
    engine_memory.fill(engine, 32)
    for step in engine_memory.steps(engine, 4, 32):
        engine.step(step)
    assert set(computed.values()) == {100}


def test_an_integer_will_do_for_a_number_but_stays_no_boolean():
    assert Recipe.from_dict(changed("quality.max_mean_kl", 1)).quality.max_mean_kl == 1.0
    with pytest.raises(InvalidRecipe):
        Recipe.from_dict(changed("quality.max_mean_kl", True))


def test_a_file_that_is_missing_or_no_toml_is_refused_in_one_line(tmp_path):
    with pytest.raises(InvalidRecipe, match="no recipe at"):
        Recipe.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = \n")
    with pytest.raises(InvalidRecipe, match="not valid TOML"):
        Recipe.load(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("properties", "complaint"),
    [
        ({"CACHE_DIR": "/tmp"}, "compile.properties.CACHE_DIR must be one of"),
        ({"INFERENCE_PRECISION_HINT": "fp32"}, "INFERENCE_PRECISION_HINT must be one of"),
        ({"INFERENCE_NUM_THREADS": -1}, r"INFERENCE_NUM_THREADS must be in \[0, 4096\], got -1"),
        ({"DYNAMIC_QUANTIZATION_GROUP_SIZE": True}, "DYNAMIC_QUANTIZATION_GROUP_SIZE must be in"),
    ],
)
def test_properties_that_the_engine_does_not_take_are_refused(properties, complaint):
    with pytest.raises(InvalidRecipe, match=complaint):
        target_openvino.check_recipe(Recipe.from_dict(changed("compile.properties", properties)))


def test_the_kernel_of_openvino_has_one_block_size():
    with pytest.raises(InvalidRecipe, match=r"kv_cache.block_size must be 32 for the openvino target, got 16"):
        target_openvino.check_recipe(Recipe.from_dict(changed("kv_cache.block_size", 16)))


def test_a_context_beyond_the_model_is_refused():
    recipe = Recipe.from_dict(changed("limits.max_model_len", 1024))
    with pytest.raises(InvalidRecipe, match=r"max_position_embeddings \(512\), got 1024"):
        compile_stage.check_recipe(recipe, {**MODEL, "max_position_embeddings": 512})


def test_a_context_beyond_the_window_is_refused_where_the_engine_attends_to_all_tokens():
    model = {**MODEL, "sliding_window": 512}
    with pytest.raises(InvalidRecipe, match=r"at most the model's sliding_window \(512\), got 1024"):
        compile_stage.check_recipe(Recipe.from_dict(VALID), model)
    compile_stage.check_recipe(Recipe.from_dict({**VALID, **LINEAR}), model)


def test_a_memory_budget_too_small_for_one_sequence_says_how_much_it_takes():
    """1,024 tokens and the engine's spare block are 33 blocks of 437,760 bytes: 13.78 MiB."""
    with pytest.raises(InvalidRecipe, match=r"kv_cache.memory_mib must be at least 14 .* got 13"):
        compile_stage.check_recipe(Recipe.from_dict(changed("kv_cache.memory_mib", 13)), MODEL)
    compile_stage.check_recipe(Recipe.from_dict(changed("kv_cache.memory_mib", 14)), MODEL)


def test_a_cache_sized_at_load_is_bounded_by_what_the_limits_can_use():
    recipe = Recipe.from_dict(changed("kv_cache.memory_mib", "auto"))
    blocks = compile_stage.check_fits(recipe, MODEL, 437_760)
    assert blocks == 8 * 1024 // 32, "8 sequences of 1,024 tokens"
    config = compile_stage.decoder_config(recipe, {**MODEL, "stop_token_ids": [2]}, blocks)["engine_config"]
    assert (config["num_blocks"], config["fit_memory"]) == (256, {"reserve_mib": 512})
    fixed = compile_stage.decoder_config(Recipe.from_dict(VALID), {**MODEL, "stop_token_ids": [2]}, 77)
    assert "fit_memory" not in fixed["engine_config"]


def test_the_target_counts_the_blocks_that_the_engine_keeps_for_itself():
    from tritonforge.engines import openvino

    assert target_openvino.SPARE_BLOCKS == openvino.SPARE_BLOCKS
    assert target_openvino.WEIGHTS == openvino.WEIGHTS


def test_the_quality_of_both_ways_to_compute_a_step_is_measured():
    """The engine pads steps: the smaller size must still be one that it computes as a decode step."""
    from tritonforge.engines import openvino

    data = changed("compile.prefill_properties", {"INFERENCE_PRECISION_HINT": "bf16"})
    small, large = target_openvino.measured_steps(Recipe.from_dict(data))
    assert openvino.padded(small) < openvino.PREFILL_MIN_TOKENS <= openvino.padded(large)
    assert target_openvino.measured_steps(Recipe.from_dict(VALID)) == (256,)


def test_memory_is_measured_with_steps_of_every_kind_up_to_the_largest():
    import engine_memory

    from tritonforge.engines.base import EngineSpec

    class Engine:
        spec = EngineSpec(vocab_size=100, max_model_len=1024, block_size=32, num_blocks=32)

    steps = engine_memory.steps(Engine, max_num_seqs=8, max_num_batched_tokens=256)
    tokens = [sum(len(sequence.token_ids) for sequence in step) for step in steps]
    assert tokens[:8] == list(range(1, 9)) and max(tokens) == 256 and len(steps[-1]) == 8
    for sequence in (sequence for step in steps for sequence in step):
        end = sequence.num_computed_tokens + len(sequence.token_ids)
        assert end <= 1024 and len(sequence.block_table) * 32 >= end and max(sequence.block_table) < 32
    assert engine_memory.sizes(4096)[-1] == 4096 and len(engine_memory.sizes(4096)) == engine_memory.MOST_SIZES


@pytest.mark.parametrize(("precision", "expected"), [("u8", 437_760), ("f16", 737_280), ("f32", 1_474_560)])
def test_bytes_of_a_kv_block_are_known_before_compiling(precision, expected):
    """u8 of SmolLM2: 30 layers x 3 heads x (40 x 64 for keys + 32 x 72 for values), as the compiled model shows it."""
    recipe = Recipe.from_dict(changed("kv_cache.precision", precision))
    assert target_openvino.estimate_bytes_per_block(recipe, MODEL) == expected


def test_decoder_json_carries_the_recipe_to_the_decoder():
    recipe = Recipe.from_dict(VALID)
    config = compile_stage.decoder_config(recipe, {**MODEL, "stop_token_ids": [0, 2]}, 77)
    assert config["engine"] == "openvino" and config["stop_token_ids"] == [0, 2]
    assert config["engine_config"]["num_blocks"] == 77 and config["engine_config"]["vocab_size"] == 49152
    limits = {**VALID["limits"], "stream_interval_ms": 100}
    assert config["scheduler"] == {name: limits[name] for name in config["scheduler"]}


def test_every_figure_beyond_its_limit_is_named():
    limits = Recipe.from_dict(VALID).quality
    quality.check({"perplexity_ratio": 1.05, "mean_kl": 0.05, "top1_agreement": 0.9}, limits)
    with pytest.raises(quality.QualityTooLow, match=r"ratio must be at most 1.05, got 1.2; mean_kl .* got 0.3; top1"):
        quality.check({"perplexity_ratio": 1.2, "mean_kl": 0.3, "top1_agreement": 0.1}, limits)

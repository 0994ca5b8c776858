"""TensorRT recipes: the shipped ones fit the GPU they name, and what TensorRT cannot take is refused by name.

If these failed, a recipe would be built for an hour and then not load, or be refused after the work was done.
"""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build"))

import target_tensorrt as target  # noqa: E402
import tensorrt_builder  # noqa: E402
import tensorrt_recipe  # noqa: E402
from recipe import Recipe  # noqa: E402

from tritonforge.engines.tensorrt_identity import ALIGNMENT, Layer, slot_bytes  # noqa: E402
from tritonforge.engines.tensorrt_plan import WIDE_ROWS, DevicePlan, buffer_bytes  # noqa: E402
from tritonforge.errors import InvalidRecipe, SetupError  # noqa: E402

SHIPPED = sorted((ROOT / "build/recipes").glob("*-tensorrt-*.toml"))
SMALL = ROOT / "build/recipes/smollm2-135m-tensorrt-fp16.toml"


@dataclass(frozen=True)
class Shape:
    """What decides a model's size, as its config.json has it."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    tied: bool
    max_position_embeddings: int

    @property
    def linear_weights(self) -> int:
        """Weights of the products of all layers, those that are quantized."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    def weight_bytes(self, recipe: Recipe) -> int:
        """Bytes of the weights; embedding and head are counted in 16 bits. INT4 has a scale and a zero for a group."""
        each = {
            "fp16": 2,
            "bf16": 2,
            "int8": 1.01,
            "w8a8": 1.01,
            "fp8": 1.01,
            "int4": 0.5 + 3 / recipe.weights.group_size,
        }
        vocabulary = self.vocab * self.hidden * (1 if self.tied else 2)
        return int(self.linear_weights * each[recipe.weights.precision]) + 2 * vocabulary

    def activation_bytes(self, tokens: int) -> int:
        """Activations of 16 bits if nothing were fused: the MLP's three, and six of the hidden size."""
        return tokens * 2 * (3 * self.intermediate + 6 * self.hidden)


SHAPES = {
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 64, 49152, True, 8192),
    "llama-3.1-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, False, 131072),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, 128, 151936, False, 40960),
}


def plan_of(recipe: Recipe, shape: Shape) -> DevicePlan:
    length = target.own_cache_len(recipe)
    layer = Layer(shape.kv_heads, shape.head_size)
    return DevicePlan(
        weight_bytes=shape.weight_bytes(recipe),
        kv_bytes=2 * recipe.kv_cache.slots * shape.layers * slot_bytes(layer, length, "float16"),
        workspace_bytes=target.workspace_bytes(recipe),
        buffer_bytes=buffer_bytes(target.own_profiles(recipe), shape.vocab, slot_bytes(layer, length, "float16")),
    )


def shape_of(recipe: Recipe) -> Shape:
    return SHAPES[recipe.name.split("-tensorrt-")[0]]


def test_the_shapes_are_those_of_the_models():
    """Counted by hand from the published sizes: 134.5 million, 8.03 and 8.19 billion parameters."""
    totals = {
        name: shape.linear_weights + shape.vocab * shape.hidden * (1 if shape.tied else 2)
        for name, shape in SHAPES.items()
    }
    assert totals["smollm2-135m"] == pytest.approx(134.5e6, rel=2e-3)
    assert totals["llama-3.1-8b"] == pytest.approx(8.03e9, rel=2e-3)
    assert totals["qwen3-8b"] == pytest.approx(8.19e9, rel=2e-3)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_weights_kv_cache_and_activations_fit_the_memory_that_the_recipe_names(path):
    recipe = Recipe.load(path)
    assert recipe.name == path.stem
    target.check_recipe(recipe)
    shape, limits = shape_of(recipe), recipe.limits
    assert limits.max_model_len <= shape.max_position_embeddings
    model = {"num_layers": shape.layers, "num_kv_heads": shape.kv_heads, "head_size": shape.head_size}
    target.check_model(recipe, model)
    plan = plan_of(recipe, shape)
    assert plan.total_bytes <= recipe.compile.properties["device_memory_mib"] * 2**20, str(plan)
    tokens = WIDE_ROWS * min(limits.max_num_batched_tokens, limits.max_model_len)
    assert shape.activation_bytes(tokens) <= plan.workspace_bytes, "the prefill profile's activations need more"
    slot = slot_bytes(Layer(shape.kv_heads, shape.head_size), target.own_cache_len(recipe), "float16")
    assert slot % ALIGNMENT == 0


@pytest.mark.parametrize("path", [path for path in SHIPPED if "8b" in path.stem], ids=lambda path: path.stem)
def test_the_plan_that_a_large_recipe_states_is_the_plan(path):
    recipe = Recipe.load(path)
    plan = plan_of(recipe, shape_of(recipe))
    stated = re.search(r"^# Plan: (.*)\.$", path.read_text(), re.MULTILINE)
    assert stated and stated[1] == f"{plan}, of {recipe.compile.properties['device_memory_mib']} MiB"


def test_four_precisions_of_the_small_model_and_two_sizes_of_the_large_ones_are_shipped():
    names = {path.stem for path in SHIPPED}
    assert names >= {f"smollm2-135m-tensorrt-{precision}" for precision in ("fp16", "int8", "int4", "fp8")}
    assert names >= {
        f"{model}-tensorrt-{size}" for model in ("llama-3.1-8b", "qwen3-8b") for size in ("int4-24gb", "fp8-80gb")
    }


def changed(**sections):
    """The small recipe with fields of sections replaced."""
    recipe = Recipe.load(SMALL)
    parts = {name: replace(getattr(recipe, name), **values) for name, values in sections.items()}
    return replace(recipe, **parts)


@pytest.mark.parametrize(
    "sections, message",
    [
        (
            {"kv_cache": {"precision": "fp8"}},
            r"kv_cache.precision must be one of f16, bf16 .* got 'fp8': TensorRT's KVC",
        ),
        ({"kv_cache": {"precision": "int8"}}, r"kv_cache.precision must be one of f16, bf16 .* got 'int8'"),
        ({"kv_cache": {"precision": "f32"}}, r"kv_cache.precision must be one of f16, bf16 .* got 'f32'"),
        ({"kv_cache": {"precision": "bf16"}}, r"kv_cache.precision must be that of weights.precision \(fp16\)"),
        ({"weights": {"precision": "fp32"}}, r"weights.precision must not be fp32"),
        ({"compile": {"prefill_properties": {"a": 1}}}, r"prefill_properties must be empty"),
        ({"compile": {"properties": {"speed": 3}}}, r"compile.properties.speed must be one of strip_weights"),
        ({"compile": {"properties": {"workspace_mib": 0}}}, r"workspace_mib must be in \[1, 1048575\], got 0"),
        ({"compile": {"properties": {"strip_weights": 1}}}, r"strip_weights must be true or false, got 1"),
        ({"compile": {"compute_capabilities": []}}, r"compute_capabilities must name GPUs, such as '8.9'"),
        ({"compile": {"compute_capabilities": ["7.5"]}}, r"must hold values of 8.0, .* only, got '7.5'"),
        (
            {"weights": {"precision": "fp8"}, "compile": {"compute_capabilities": ["8.9", "8.6"]}},
            r"must hold values from 8.9 on for fp8 weights, got '8.6'",
        ),
    ],
)
def test_what_tensorrt_does_not_take_is_refused_with_field_value_and_rule(sections, message):
    with pytest.raises(InvalidRecipe, match=message):
        target.check_recipe(changed(**sections))


def test_a_kv_cache_larger_than_the_named_device_is_refused_before_any_work():
    recipe = changed(kv_cache={"slots": 512}, compile={"properties": {"device_memory_mib": 8192}})
    model = {"num_layers": 30, "num_kv_heads": 3, "head_size": 64}
    with pytest.raises(InvalidRecipe, match=r"at least \d+, got 8192: .*lower kv_cache.slots \(512\)"):
        target.check_model(recipe, model)


def test_a_model_with_softcapped_attention_is_refused_by_name_before_any_work():
    model = {"model_type": "gemma2", "num_layers": 2, "num_kv_heads": 2, "head_size": 16}
    with pytest.raises(InvalidRecipe, match=r"not be tensorrt for model_type gemma2: .*softcap"):
        target.check_model(changed(), model)


def test_without_tensorrt_the_remedy_is_said_before_any_work(monkeypatch):
    monkeypatch.setattr(tensorrt_builder, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"pip install tensorrt-rtx-cu12, no GPU needed to build"):
        target.check_tools(changed())


class Offers:
    """A TensorRT whose builder can be told to build for two GPU generations."""

    __name__, __version__ = "tensorrt_rtx", "1.7.1"

    class ComputeCapability:
        __members__ = {"NONE": 0, "CURRENT": 1, "SM89": 89, "SM120": 120}  # noqa: RUF012 (as the enum has it)


def test_a_gpu_that_the_installed_tensorrt_does_not_build_for_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(tensorrt_builder, "import_flavour", lambda: Offers())
    assert tensorrt_builder.offered_capabilities(Offers()) == ("8.9", "12.0")
    target.check_tools(changed(compile={"compute_capabilities": ["12.0"]}))
    with pytest.raises(InvalidRecipe, match=r"among 8.9, 12.0, which tensorrt_rtx 1.7.1 builds for here, got 9.0"):
        target.check_tools(changed(compile={"compute_capabilities": ["8.9", "9.0"]}))


def test_an_engine_without_weights_is_built_only_where_a_gpu_is(monkeypatch):
    def absent():
        raise SetupError("no NVIDIA driver")

    monkeypatch.setattr(tensorrt_builder, "import_flavour", lambda: Offers())
    monkeypatch.setattr(tensorrt_recipe, "require_driver", absent)
    stripped = {"compute_capabilities": ["8.9"], "properties": {"strip_weights": True}}
    with pytest.raises(SetupError, match=r"strip_weights needs a GPU where it is built: no NVIDIA driver"):
        target.check_tools(changed(compile=stripped))


def test_bfloat16_is_built_only_where_its_quality_can_be_measured(monkeypatch):
    """ONNX Runtime has no attention in bfloat16 on a CPU: the build would fail after all work was done."""

    def absent():
        raise SetupError("no NVIDIA driver")

    monkeypatch.setattr(tensorrt_builder, "import_flavour", lambda: Offers())
    bf16 = changed(
        weights={"precision": "bf16"}, kv_cache={"precision": "bf16"}, compile={"compute_capabilities": ["8.9"]}
    )
    target.check_recipe(bf16)
    monkeypatch.setattr(tensorrt_recipe, "require_driver", absent)
    with pytest.raises(SetupError, match=r"bf16 needs a GPU where it is built: its quality .*: no NVIDIA driver"):
        target.check_tools(bf16)
    monkeypatch.setattr(tensorrt_recipe, "require_driver", lambda: 1)
    target.check_tools(bf16)

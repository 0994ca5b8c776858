"""What a recipe for the tensorrt target may say: everything that can be refused before an engine is built.

The tensorrt target exports both checks as its own: of the recipe alone, and of what is installed here.
"""

import checkout  # noqa: F401  (puts the repository root on sys.path)
import tensorrt_builder
from recipe import Recipe
from recipe_fields import check_properties

from tritonforge.engines.tensorrt_device import Device, require_driver
from tritonforge.errors import InvalidRecipe, SetupError

KV_DTYPES = {"f16": "float16", "bf16": "bfloat16"}
"""KV cache precisions that build. KVCacheUpdate takes no quantized cache (INetworkDefinition::addKVCacheUpdate), and
for float32 there is no fused attention kernel."""

CAPABILITIES = ("8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
"""Compute capabilities with kernels for these graphs; Turing (7.5) has none for their float32 products."""

LEAST_CAPABILITY = {"fp8": (8, 9)}
"""FP8 products need Ada or later, by NVIDIA's support matrix."""

PROPERTIES = {
    "strip_weights": (False, True),
    "workspace_mib": range(1, 1 << 20),
    "optimization_level": range(0, 6),
    "device_memory_mib": range(1, 1 << 24),
}
"""Properties that a recipe may set. workspace_mib is for activations; device_memory_mib is the memory of the smallest
GPU that the engine is meant for."""


def check_recipe(recipe: Recipe) -> None:
    """Refuse what no TensorRT takes; needs none. Raises InvalidRecipe."""
    cache, weights = recipe.kv_cache.precision, recipe.weights.precision
    if cache not in KV_DTYPES:
        raise InvalidRecipe(
            f"kv_cache.precision must be one of {', '.join(KV_DTYPES)} for the tensorrt target, got {cache!r}: "
            "TensorRT's KVCacheUpdate takes no quantized cache, and no attention kernel takes float32"
        )
    if weights == "fp32":
        raise InvalidRecipe("weights.precision must not be fp32 for the tensorrt target: no attention kernel takes it")
    if (weights == "bf16") != (cache == "bf16") and weights in ("fp16", "bf16"):
        raise InvalidRecipe(f"kv_cache.precision must be that of weights.precision ({weights}), got {cache!r}")
    if recipe.compile.prefill_properties:
        raise InvalidRecipe("compile.prefill_properties must be empty for the tensorrt target: it has two profiles")
    check_properties("compile.properties", recipe.compile.properties, PROPERTIES)
    _check_capabilities(recipe)


def _check_capabilities(recipe: Recipe) -> None:
    wanted, precision = recipe.compile.compute_capabilities, recipe.weights.precision
    if not wanted:
        raise InvalidRecipe(f"compile.compute_capabilities must name GPUs, such as {CAPABILITIES[3]!r}; it is empty")
    for capability in wanted:
        label = f"compile.compute_capabilities must hold {{}}, got {capability!r}"
        if capability not in CAPABILITIES:
            raise InvalidRecipe(label.format(f"values of {', '.join(CAPABILITIES)} only"))
        least = LEAST_CAPABILITY.get(precision, (8, 0))
        if tuple(map(int, capability.split("."))) < least:
            raise InvalidRecipe(label.format(f"values from {least[0]}.{least[1]} on for {precision} weights"))


def check_tools(recipe: Recipe) -> None:
    """Refuse what the TensorRT that is installed here cannot build on this machine: SetupError or InvalidRecipe."""
    wanted = recipe.compile.compute_capabilities
    trt = tensorrt_builder.import_flavour()
    offered = tensorrt_builder.offered_capabilities(trt)
    if not offered:
        require_driver()
        device = Device()
        offered = (device.compute_capability,)
        device.close()
    missing = [capability for capability in wanted if capability not in offered]
    if missing:
        raise InvalidRecipe(
            f"compile.compute_capabilities must be among {', '.join(offered)}, which {trt.__name__} {trt.__version__} "
            f"builds for here, got {', '.join(missing)}"
        )
    if recipe.compile.properties.get("strip_weights"):
        _need_gpu("compile.properties.strip_weights needs a GPU where it is built")
    if recipe.kv_cache.precision == "bf16":
        _need_gpu("kv_cache.precision bf16 needs a GPU where it is built: its quality cannot be measured on a CPU")


def _need_gpu(why: str) -> None:
    try:
        require_driver()
    except SetupError as error:
        raise SetupError(f"{why}: {Exception.__str__(error)}") from None

"""Builds the TensorRT recipes on a machine with a GPU, runs them, and prints one table: right? and how fast?

make gpu-check
.venv-build/bin/python scripts/gpu_check.py --recipes smollm2-135m-tensorrt-fp16

Each engine is compared with float32 (perplexity, KL, top-1) and with ONNX Runtime on the same graph (largest difference
of logits). Times are medians, as the engine loop sees them, beside floors: what the bytes of a step take at the memory
bandwidth that a copy reaches, what its products take at the GPU's peak. Without a driver it says so and ends.
"""

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "build"), str(ROOT / "scripts")]

import numpy as np  # noqa: E402
from gpu_floors import (  # noqa: E402
    TENSOR_FLOPS,
    Peak,
    Row,
    decode_floor_ms,
    prefill_floor_ms,
    product_parameters,
    table,
)

from tritonforge.engines.base import Engine, SequenceStep  # noqa: E402
from tritonforge.engines.tensorrt_device import Device, require_driver  # noqa: E402
from tritonforge.engines.tensorrt_identity import Identity  # noqa: E402
from tritonforge.errors import SetupError, TritonForgeError  # noqa: E402

RECIPES = tuple(f"smollm2-135m-tensorrt-{precision}" for precision in ("fp16", "int8", "int4", "fp8"))
OUT = ROOT / "artifacts" / "gpu-check"
REPEATS = 20
COPY_BYTES = 1 << 30
PREFILL_TOKENS = 512
CONTEXT = 512


def measure_peak(device: Device) -> Peak:
    """Copy a large buffer, reading and writing it, and ask for clock and multiprocessors."""
    source, target = device.allocate(COPY_BYTES), device.allocate(COPY_BYTES)
    piece = COPY_BYTES // 1024

    def copy() -> None:
        device.copy(target, source, piece, piece, 1024)
        device.wait()

    seconds = median_ms(copy) / 1e3
    flops = TENSOR_FLOPS.get(device.compute_capability, 0) * device.clock_hz * device.multiprocessors
    return Peak(2 * COPY_BYTES / seconds, flops)


def median_ms(run: Callable[[], Any]) -> float:
    """Median wall time of `run()` after two warm-up calls: the second one may replay a CUDA graph."""
    run()
    run()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e6


def prefill_ms(engine: Engine, tokens: int) -> float:
    """Prefill `tokens` tokens of one sequence."""
    ids = [index % engine.spec.vocab_size for index in range(tokens)]
    return median_ms(lambda: engine.step([SequenceStep(ids, 0, [0])]))


def decode_ms(engine: Engine, batch: int, context: int) -> float:
    """Decode one token of each of `batch` sequences behind `context` tokens."""
    for slot in range(batch):
        engine.step([SequenceStep([slot] * context, 0, [slot])])
    steps = [SequenceStep([slot], context, [slot]) for slot in range(batch)]
    return median_ms(lambda: engine.step(steps))


def largest_difference(engine: Engine, reference: Engine) -> float:
    """The largest |difference| of logits after a prefill, a second chunk and decodes of two sequences."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return rng.integers(0, engine.spec.vocab_size, count).tolist()

    steps = [[SequenceStep(ids(40), 0, [0]), SequenceStep(ids(7), 0, [1])], [SequenceStep(ids(30), 40, [0])]]
    steps += [[SequenceStep(ids(1), 70 + n, [0]), SequenceStep(ids(1), 7 + n, [1])] for n in range(8)]
    return max(float(np.abs(engine.step(step) - reference.step(step)).max()) for step in steps)


@dataclass(frozen=True)
class Prepared:
    """A recipe with the finished stages that its engine is built from; `model` holds the checkpoint's facts."""

    recipe: Any
    exported: Path
    quantized: Path
    model: dict[str, Any]


def prepare(name: str, capability: str) -> Prepared:
    """Export and quantize the recipe `name`, to be built for this GPU; what cannot be built is refused first."""
    import checkpoint
    import export
    import quantize
    import target_tensorrt as target
    from recipe import Recipe

    recipe = Recipe.load(ROOT / "build" / "recipes" / f"{name}.toml")
    recipe = replace(recipe, compile=replace(recipe.compile, compute_capabilities=[capability]))
    target.check_recipe(recipe)
    target.check_tools(recipe)
    located = checkpoint.locate(recipe.checkpoint.source, recipe.checkpoint.sha256)
    work = ROOT / "artifacts" / "build"
    exported = export.export(located, work / export.folder_of(located, recipe.format), format=recipe.format)
    model = exported.measurements["model"]
    target.check_model(recipe, model)
    quantized = quantize.quantize(exported, recipe, work / f"quantize-{recipe.name}")
    return Prepared(recipe, exported.folder, quantized.folder, model)


def check(name: str, capability: str, peak: Peak) -> Row:
    """Build the recipe `name` for this GPU, run it and measure it."""
    import compile as compile_stage
    import onnx
    import target_tensorrt as target

    made = prepare(name, capability)
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    begin = time.monotonic()
    target.place(made.quantized, folder, made.recipe)
    build_s = time.monotonic() - begin
    identity = Identity.read(folder)
    graph = onnx.load(made.exported / "model.onnx", load_external_data=False).graph
    parameters = product_parameters([tuple(one.dims) for one in graph.initializer], identity.vocab_size)
    config = compile_stage.decoder_config(made.recipe, made.model, made.recipe.kv_cache.slots)["engine_config"]
    engine = target.open_engine(folder, config)
    try:
        reference = target.open_measured(made.quantized, folder, config)
        difference = largest_difference(engine, reference)
        reference.close()
        return measured_row(engine, made, identity, parameters, peak, build_s, difference)
    finally:
        engine.close()


def measured_row(
    engine: Engine,
    made: Prepared,
    identity: Identity,
    parameters: int,
    peak: Peak,
    build_s: float,
    difference: float,
) -> Row:
    """The table's line of an open engine."""
    import quality
    from reference import REFERENCE

    limits, slots = made.recipe.limits, identity.slots
    report = quality.measure(engine, made.exported / REFERENCE, limits.max_num_batched_tokens)
    tokens, context = min(PREFILL_TOKENS, limits.max_model_len), min(CONTEXT, limits.max_model_len - 1)
    fp8 = made.recipe.weights.precision == "fp8"
    return Row(
        recipe=made.recipe.name,
        engine_mib=identity.engine_bytes / 2**20,
        build_s=build_s,
        perplexity_ratio=report["perplexity_ratio"],
        mean_kl=report["mean_kl"],
        top1=report["top1_agreement"],
        difference=difference,
        prefill=(prefill_ms(engine, tokens), prefill_floor_ms(identity, parameters, tokens, peak, fp8=fp8)),
        decode_one=(decode_ms(engine, 1, context), decode_floor_ms(identity, 1, context, peak)),
        decode_all=(decode_ms(engine, slots, context), decode_floor_ms(identity, slots, context, peak)),
    )


def main() -> int:
    """Exit code 0 when every recipe ran, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="NAME")
    parser.add_argument("--driver", action="store_true", help="only say whether there is a driver")
    options = parser.parse_args()
    try:
        require_driver()
        if options.driver:
            return 0
        device = Device()
    except SetupError as error:
        print(f"gpu-check: {Exception.__str__(error)}; nothing was run", file=sys.stderr)
        return 1
    peak = measure_peak(device)
    print(f"{device.name}, compute capability {device.compute_capability}: {peak.bytes_per_s / 1e9:.0f} GB/s copied,")
    print(f"{peak.flops_per_s / 1e12:.0f} TFLOP/s at most; a time is followed by (times its floor)")
    capability = device.compute_capability
    device.close()
    rows, failures = [], {}
    for name in options.recipes:
        try:
            rows.append(check(name, capability, peak))
        except TritonForgeError as error:
            failures[name] = Exception.__str__(error)
    print(table(rows, failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""From a tiny random checkpoint to a release: every precision, every architecture, twice the same, or refused."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import checkout
import checkpoint
import pytest
import release as release_script
import stage
from quality import QualityTooLow
from recipe import Checkpoint, KVCache, Limits, Quality, Recipe, Weights
from tiny_checkpoint import write_checkpoint

from tritonforge.errors import InvalidRecipe
from tritonforge.release import Release

SHIPPED = Recipe.load(checkout.RECIPES / "smollm2-135m-int8.toml")
LIMITS = Limits(max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=256, max_waiting=8, max_waiting_tokens=4096)


def tiny_recipe(source: Path, **sections) -> Recipe:
    """An int8 recipe for a tiny checkpoint; its quality limits suit random weights."""
    values = {
        "name": "tiny",
        "checkpoint": Checkpoint(source=str(source)),
        "weights": Weights(precision="int8"),
        "kv_cache": KVCache(memory_mib=4),
        "limits": LIMITS,
        "quality": Quality(max_perplexity_ratio=1.05, max_mean_kl=0.01, min_top1_agreement=0.9),
    }
    return dataclasses.replace(SHIPPED, **{**values, **sections})


def build(recipe: Recipe, folder: Path, force=(), work: Path | None = None) -> Release:
    """Run a recipe with its release in `folder`, and its stages in `work` or beside it."""
    return release_script.build(recipe, work or folder / "work", folder / "release", force)


@pytest.fixture(scope="module")
def shared_work(tmp_path_factory) -> Path:
    """A folder of stages for tests of one checkpoint: its export is made once."""
    return tmp_path_factory.mktemp("work")


QUICK = ("llama", "phi3")
"""Architectures that differ most; the others are tried by `make test-slow`."""
MODEL_TYPES = [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in checkpoint.ARCHITECTURES]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_known_architecture_becomes_a_release_close_to_its_reference(model_type, tmp_path):
    release = build(tiny_recipe(write_checkpoint(tmp_path / "checkpoint", model_type)), tmp_path)
    release.verify()
    assert release.manifest["quality"]["mean_kl"] < 0.01
    assert release.manifest["checkpoint"]["model"]["stop_token_ids"] == [0, 2]


@pytest.mark.parametrize(("precision", "largest"), [("bf16", 0.55), ("int8", 0.32), ("int4", 0.27)])
def test_weights_get_smaller_and_stay_close(tiny, tmp_path, shared_work, precision, largest):
    """Random weights are the worst case for int4: the limit here only catches a broken graph."""
    weights = Weights(precision=precision, int4_ratio=1.0)
    quality = Quality(max_perplexity_ratio=1.3, max_mean_kl=0.3, min_top1_agreement=0.3)
    recipe = tiny_recipe(tiny, weights=weights, quality=quality)
    release = build(recipe, tmp_path, work=shared_work)
    sizes = release.manifest["sizes"]
    assert sizes["weight_bytes"] < largest * sizes["weight_bytes_float32"]
    again = build(recipe, tmp_path, force=("quantize", "compile", "assemble"), work=shared_work)
    assert again.digest == release.digest


def test_weights_from_four_bits_are_kept_exactly(tmp_path):
    """Every matrix lies on a grid of float16 step and minimum, as a Q4 file gives it; only the head is in 8 bits."""
    import torch

    def on_grid(model):
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
                groups = weight.view(len(weight), -1, 32)
                low = groups.amin(-1, keepdim=True).half().float()
                step = ((groups.amax(-1, keepdim=True) - low) / 15).half().float()
                groups.copy_(low + step * torch.round((groups - low) / step).clamp(0, 15))

    source = write_checkpoint(tmp_path / "checkpoint", prepare=on_grid)
    quality = Quality(max_perplexity_ratio=1.05, max_mean_kl=0.01, min_top1_agreement=0.5)
    release = build(tiny_recipe(source, weights=Weights(precision="int4"), quality=quality), tmp_path)
    assert release.manifest["stages"]["quantize"]["measurements"]["method"] == "exact 4-bit grid"
    assert release.manifest["quality"]["mean_kl"] < 0.001


def test_a_second_run_makes_nothing_and_another_process_makes_the_same(tiny, tmp_path):
    recipe = tiny_recipe(tiny)
    first = build(recipe, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    build(recipe, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before

    code = f"""
import sys; sys.path[:0] = {[str(checkout.ROOT / "build"), str(checkout.ROOT / "tests/build")]!r}
from pathlib import Path
from test_build_pipeline import build, tiny_recipe
print(build(tiny_recipe(Path({str(tiny)!r})), Path({str(tmp_path / "other")!r})).digest)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=checkout.ROOT)
    assert done.stdout.split()[-1] == first.digest


def test_other_stop_tokens_reach_the_release_although_the_exported_files_are_the_same(tmp_path):
    source = write_checkpoint(tmp_path / "checkpoint")
    first = build(tiny_recipe(source), tmp_path)
    path = source / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, 7]}))
    second = build(tiny_recipe(source), tmp_path)
    stages = [release.manifest["stages"]["export"]["digest"] for release in (first, second)]
    assert stages[0] == stages[1], "else this test proves nothing"
    config = json.loads((second.model_repository / "decoder/1/decoder.json").read_text())
    assert config["stop_token_ids"] == second.manifest["checkpoint"]["model"]["stop_token_ids"] == [0, 2, 7]
    assert second.manifest["checkpoint"]["revision"] == checkpoint.locate(str(source)).revision


def test_quality_below_the_limit_fails_the_build_with_figures_and_leaves_no_release(tiny, tmp_path, shared_work):
    recipe = tiny_recipe(tiny, quality=Quality(max_perplexity_ratio=1.05, max_mean_kl=0.0, min_top1_agreement=1.0))
    with pytest.raises(
        QualityTooLow, match=r"mean_kl must be at most 0.0, got 0\.\d+; top1_agreement must be at least"
    ):
        build(recipe, tmp_path)
    assert not (tmp_path / "release").exists()


def test_what_does_not_fit_the_model_is_refused_before_any_work(tiny, tmp_path):
    limits = dataclasses.replace(LIMITS, max_model_len=4096)
    with pytest.raises(InvalidRecipe, match="max_position_embeddings"):
        build(tiny_recipe(tiny, limits=limits), tmp_path)
    assert not (tmp_path / "work").exists()


def test_stage_scripts_run_alone_and_refuse_what_no_record_holds(tiny, tmp_path):
    recipe = tmp_path / "tiny.toml"
    text = (checkout.RECIPES / "smollm2-135m-int8.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("source =", "sha256 ="))]
    lines.insert(lines.index("[checkpoint]") + 1, f"source = {json.dumps(str(tiny))}")
    recipe.write_text("\n".join(lines))

    def run(script, *inputs):
        command = [sys.executable, str(checkout.ROOT / "build" / f"{script}.py"), "--recipe", str(recipe)]
        for name in inputs:
            command += [f"--{name}", str(tmp_path / name)]
        command += ["--out", str(tmp_path / script)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    for script, inputs in (("export", ()), ("quantize", ("export",)), ("compile", ("export", "quantize"))):
        done = run(script, *inputs)
        assert done.returncode == 0, done.stderr
    done = run("assemble", "export", "quantize", "compile")
    assert done.returncode == 0, done.stderr
    Release.open(tmp_path / "assemble").verify()

    shipped, text = recipe, recipe.read_text()
    recipe = tmp_path / "int4.toml"
    recipe.write_text(text.replace('precision = "int8"', 'precision = "int4"'))
    for script, inputs in (("compile", ("export", "quantize")), ("assemble", ("export", "quantize", "compile"))):
        assert "was made with precision 'int8'" in run(script, *inputs).stderr
    recipe = shipped

    weights = tmp_path / "quantize" / "openvino_model.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    done = run("compile", "export", "quantize")
    assert done.returncode == 1 and "openvino_model.bin" in done.stderr and "changed" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    (tmp_path / "quantize" / stage.RECORD).unlink()
    assert "run build/quantize.py first" in run("compile", "export", "quantize").stderr

"""Run a recipe: checkpoint -> export -> quantize -> compile -> assemble -> release, skipping what is already made.

python build/release.py --recipe smollm2-135m-int8
python build/release.py --recipe smollm2-135m-int8 --checkpoint ./my-model --name my-model-int8
"""

import argparse
import dataclasses
import time
from pathlib import Path

import assemble
import checkout
import checkpoint
import compile as compile_stage
import export
import quantize
import stage
from recipe import NAME, Checkpoint, Recipe

from tritonforge.errors import InvalidRecipe
from tritonforge.release import Release

STAGES = ("export", "quantize", "compile", "assemble")


def build(recipe: Recipe, work: Path, out: Path, force: tuple[str, ...] = ()) -> Release:
    """Make the release `out` of a recipe; stages named in `force` are made again even if nothing changed."""
    located = checkpoint.locate(recipe.checkpoint.source, recipe.checkpoint.sha256)
    folder = work / export.folder_of(located, recipe.format)
    planned = stage.finished(export.plan_stage(located, recipe.format), folder)
    model = planned.measurements["model"] if planned else dataclasses.asdict(export.inspect(located, recipe.format))
    compile_stage.check_recipe(recipe, model)
    compile_stage.check_tools(recipe)

    exported = export.export(located, folder, format=recipe.format, force="export" in force)
    folder = work / f"quantize-{recipe.name}"
    quantized = quantize.quantize(exported, recipe, folder, force="quantize" in force)
    folder = work / f"compile-{recipe.name}"
    compiled = compile_stage.compile_model(exported, quantized, recipe, folder, force="compile" in force)
    parts = {"export": exported, "quantize": quantized, "compile": compiled}
    return assemble.assemble(parts, recipe, out, force="assemble" in force)


def summary(release: Release) -> str:
    """What was made, in one line."""
    quality, sizes = release.manifest["quality"], release.manifest["sizes"]
    return (
        f"release   {release.name} {release.digest[:12]}: {sizes['release_bytes'] / 2**20:.1f} MiB, "
        f"{sizes['kv_cache']['num_blocks']} KV blocks, perplexity {quality['perplexity']:.2f} "
        f"({quality['perplexity_ratio']:.4f} of float32), mean KL {quality['mean_kl']:.4f}, "
        f"top-1 agreement {quality['top1_agreement']:.3f}"
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", required=True, help="recipe file, or the name of one in build/recipes")
    parser.add_argument("--checkpoint", help="another source than the recipe's: folder, .gguf file, hub:owner/name")
    parser.add_argument("--name", help="another name for the release than the recipe's")
    parser.add_argument("--out", type=Path, help="release folder (default: artifacts/releases/<name>)")
    parser.add_argument(
        "--work", type=Path, default=checkout.WORK, help="folder of the stages (default: artifacts/build)"
    )
    parser.add_argument("--force", nargs="*", choices=STAGES, help="make these stages again; all when none is named")
    return parser.parse_args()


def read_recipe(options: argparse.Namespace) -> Recipe:
    """The recipe with what the command line replaces."""
    path = Path(options.recipe)
    if not path.suffix and not path.exists():
        path = checkout.RECIPES / f"{options.recipe}.toml"
    recipe = Recipe.load(path)
    if options.checkpoint:
        recipe = dataclasses.replace(recipe, checkpoint=Checkpoint(source=options.checkpoint))
    if options.name:
        if not NAME.fullmatch(options.name):
            raise InvalidRecipe(f"name must match {NAME.pattern}, got {options.name!r}")
        recipe = dataclasses.replace(recipe, name=options.name)
    return recipe


def main() -> None:
    options = parse()
    begin = time.monotonic()
    recipe = read_recipe(options)
    force = () if options.force is None else tuple(options.force) or STAGES
    release = build(recipe, options.work, options.out or checkout.RELEASES / recipe.name, force)
    stage.say(f"{summary(release)}; {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    stage.script(main)

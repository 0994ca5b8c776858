"""Stage assemble: engine, tokenizer and the served models' files become a release, its manifest written last.

    python build/assemble.py --recipe RECIPE --export DIR --quantize DIR --compile DIR --out DIR

Needs neither torch nor an engine.
"""

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import chain
import checkout
import compile as compile_stage
import quantize
import stage
from recipe import Recipe

from tritonforge.chat import TEMPLATE_FILE, TOOL_TEMPLATE_FILE
from tritonforge.errors import ReleaseMismatch, TritonForgeError
from tritonforge.prompt import LIMITS_FILE
from tritonforge.release import Release, content_digest, describe_files, digest_of, list_files, write_manifest

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", TEMPLATE_FILE, TOOL_TEMPLATE_FILE)
NOT_REPRODUCIBLE: dict[str, str] = {}
"""Files of a release that two builds on one machine do not make the same, with the reason; none is known."""


def plan_stage(parts: dict[str, stage.Done], recipe: Recipe) -> stage.Stage:
    """The assembly of finished stages (`parts` by stage name) and the repository's model files.

    `records` covers what the manifest says of the stages: it may change when their files do not.
    """
    models = content_digest(describe_files(checkout.MODEL_REPOSITORY))
    records = {name: {key: part.record[key] for key in KEPT if key != "seconds"} for name, part in parts.items()}
    digests = {name: part.digest for name, part in parts.items()}
    return stage.Stage(
        name="assemble",
        makes=f"release {recipe.name}",
        inputs={**digests, "records": digest_of(records), "model_repository": models},
        settings=published(recipe),
        packages=("python",),
        sources=("build/assemble.py", "tritonforge/release.py"),
    )


def published(recipe: Recipe) -> dict[str, Any]:
    """The recipe as the manifest shows it: a local checkpoint goes by its name, not by where it lay."""
    values = recipe.as_dict()
    if not recipe.checkpoint.source.startswith(("pypi:", "hub:")):
        values["checkpoint"]["source"] = Path(recipe.checkpoint.source).name
    return values


def assemble(parts: dict[str, stage.Done], recipe: Recipe, out: Path, *, force: bool = False) -> Release:
    """Make the release `out` from the stages export, quantize and compile, or keep it when nothing changed."""
    plan = plan_stage(parts, recipe)
    release = None if force else kept(out, digest_of(plan.facts()))
    if release is not None:
        stage.say(f"assemble  {plan.makes}: kept, its inputs are the same, in {stage.shown(out)}")
        return release
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.partial-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        fill(scratch / "model_repository", parts)
        release = write_manifest(scratch, name=recipe.name, **facts(plan, parts, recipe, scratch))
        for name in (*list_files(scratch),):
            (scratch / name).chmod(0o444)
        stage.replace_folder(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    stage.say(f"assemble  {plan.makes}: digest {release.digest[:12]}, in {stage.shown(out)}")
    return Release.open(out)


def kept(out: Path, key: str) -> Release | None:
    """The release in `out` if it was made from the same facts and is intact, else None."""
    try:
        release = Release.open(out)
        if release.manifest["stages"]["assemble"]["key"] != key:
            return None
        release.verify()
    except (TritonForgeError, KeyError, TypeError):
        return None
    return release


def fill(repository: Path, parts: dict[str, stage.Done]) -> None:
    """Copy the models of the checkout and the outputs of the stages into a model repository."""
    shutil.copytree(checkout.MODEL_REPOSITORY, repository, ignore=shutil.ignore_patterns("__pycache__"))
    for name in TOKENIZER_FILES:
        source = parts["export"].folder / name
        if source.is_file():
            for model in ("tokenizer", "decoder"):
                target = repository / model / "1" / name
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(source, target)
    compiled = parts["compile"]
    for name in compiled.record["files"]:
        target = repository / "decoder" / "1" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(compiled.folder / name, target)
    engine = json.loads((repository / "decoder" / "1" / "decoder.json").read_text(encoding="utf-8"))["engine_config"]
    limits = {"max_model_len": engine["max_model_len"]}
    (repository / "tokenizer" / "1" / LIMITS_FILE).write_text(json.dumps(limits) + "\n", encoding="utf-8")


def facts(plan: stage.Stage, parts: dict[str, stage.Done], recipe: Recipe, scratch: Path) -> dict[str, Any]:
    """What the manifest says of the build."""
    exported, compiled = parts["export"], parts["compile"]
    made = exported.measurements
    tokenizer = {name: exported.record["files"][name] for name in TOKENIZER_FILES if name in exported.record["files"]}
    assembly = plan.facts()
    stages = {name: {key: part.record[key] for key in KEPT} for name, part in parts.items()}
    stages["assemble"] = {**assembly, "key": digest_of(assembly)}
    sizes = [(scratch / name).stat().st_size for name in list_files(scratch)]
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": published(recipe),
        "checkpoint": {
            "source": made["source"],
            "revision": made["revision"],
            "digest": exported.record["inputs"]["checkpoint"],
            "model": made["model"],
        },
        "tokenizer_digest": content_digest(tokenizer),
        "tools": {name: version for item in stages.values() for name, version in item["tools"].items()},
        "quality": compiled.measurements["quality"],
        "sizes": {
            "weight_bytes": parts["quantize"].measurements["weight_bytes"],
            "weight_bytes_float32": parts["quantize"].measurements["weight_bytes_float32"],
            "kv_cache": compiled.measurements["kv_cache"],
            "memory": compiled.measurements["memory"],
            "release_bytes": sum(sizes),
        },
        "stages": stages,
        "not_reproducible": NOT_REPRODUCIBLE,
    }


KEPT = ("inputs", "settings", "tools", "code", "key", "digest", "seconds", "measurements")
"""What of a stage's record goes into the manifest."""


def check_chain(parts: dict[str, stage.Done], recipe: Recipe) -> None:
    """Refuse stages that were not made from each other, or not from the recipe's checkpoint and as the recipe says."""
    for part in parts.values():
        chain.check_inputs(part, parts)
    exported = parts["export"]
    source, made = published(recipe)["checkpoint"]["source"], exported.measurements["source"]
    if made != source:
        raise ReleaseMismatch(
            f"the export stage in {exported.folder} is of {made}, recipe {recipe.name} gives {source}"
        )
    chain.check_settings(parts["quantize"], quantize.settings(recipe), recipe.name)
    compiled = compile_stage.settings(recipe, exported.measurements["model"])
    chain.check_settings(parts["compile"], compiled, recipe.name)


def main() -> None:
    names = ("export", "quantize", "compile")
    options = stage.arguments(__doc__.splitlines()[0], *names).parse_args()
    parts = {name: stage.open_input(getattr(options, name), name) for name in names}
    recipe = Recipe.load(options.recipe)
    check_chain(parts, recipe)
    assemble(parts, recipe, options.out, force=options.force)


if __name__ == "__main__":
    stage.script(main)

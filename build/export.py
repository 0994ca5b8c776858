"""Stage export: a checkpoint becomes a float32 OpenVINO model, its tokenizer, and what float32 says of known text.

    python build/export.py --recipe build/recipes/smollm2-135m-int8.toml --out DIR

Only this stage needs torch and transformers. Its outputs depend on the checkpoint alone, so recipes share them.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)
import checkpoint
import ir
import reference
import stage
import texts
from recipe import Recipe

from tritonforge.chat import TEMPLATE_FILE, TOOL_TEMPLATE_FILE, read_sources

SOURCES = tuple(
    f"build/{name}.py" for name in ("export", "checkpoint", "gguf_checkpoint", "sources", "reference", "texts", "ir")
)
PACKAGES = ("python", "torch", "transformers", "optimum", "optimum-intel", "openvino", "tokenizers", "gguf")


def plan_stage(located: checkpoint.Located) -> stage.Stage:
    """The export of one checkpoint."""
    return stage.Stage(
        name="export",
        makes="float32 model, tokenizer and reference",
        inputs={"checkpoint": located.digest, "texts": texts.digest(texts.QUALITY)},
        settings=settings(located),
        packages=PACKAGES,
        sources=SOURCES,
    )


def settings(located: checkpoint.Located) -> dict[str, Any]:
    """Where the checkpoint came from: the files do not depend on it, the manifest says it."""
    return {"source": located.source, "revision": located.revision}


def export(located: checkpoint.Located, out: Path, *, force: bool = False) -> stage.Done:
    """Make `out` from a located checkpoint; the record's measurements hold its facts as `model`."""

    def make(folder: Path) -> dict[str, Any]:
        facts = checkpoint.inspect(located)
        model = load(located)
        write_tokenizer(located, folder)
        measured = reference.write_reference(model, folder)
        write_openvino(model, folder)
        return {"model": dataclasses.asdict(facts), "source": located.source, "revision": located.revision, **measured}

    return stage.run_stage(plan_stage(located), out, make, force=force)


def load(located: checkpoint.Located) -> Any:
    """The float32 torch model of a checkpoint. Custom code is never run."""
    import torch
    from transformers import AutoModelForCausalLM

    where = {"gguf_file": located.path.name} if located.is_gguf else {"use_safetensors": True}
    home = located.path.parent if located.is_gguf else located.path
    return AutoModelForCausalLM.from_pretrained(
        home, dtype=torch.float32, trust_remote_code=False, local_files_only=True, **where
    ).eval()


def write_tokenizer(located: checkpoint.Located, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat templates, where there are any."""
    if located.is_gguf:
        import gguf_checkpoint

        reader = gguf_checkpoint.open_gguf(located.path)
        gguf_checkpoint.build_tokenizer(reader).save(str(folder / "tokenizer.json"), pretty=False)
        config = gguf_checkpoint.tokenizer_config(reader)
        template = gguf_checkpoint.metadata(reader, "tokenizer.chat_template")
        sources = {} if template is None else {"default": template}
    else:
        shutil.copyfile(located.path / "tokenizer.json", folder / "tokenizer.json")
        path = located.path / "tokenizer_config.json"
        config = checkpoint.read_json(path) if path.is_file() else {}
        sources = read_sources(located.path, config)
    config.pop("chat_template", None)
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    for name, file in (("default", TEMPLATE_FILE), ("tool_use", TOOL_TEMPLATE_FILE)):
        if name in sources:
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(sources[name], encoding="utf-8")


def write_openvino(model: Any, folder: Path) -> None:
    """Write the stateful float32 OpenVINO model of a torch model to `folder`."""
    import openvino as ov
    from optimum.exporters.openvino import export_from_model
    from optimum.intel.openvino import OVConfig

    scratch = folder / "optimum"
    export_from_model(model, scratch, task="text-generation-with-past", ov_config=OVConfig(dtype="fp32"), stateful=True)
    exported = ov.Core().read_model(scratch / f"{ir.MODEL}.xml")
    ir.normalise(exported)
    ov.save_model(exported, folder / f"{ir.MODEL}.xml", compress_to_fp16=False)
    del exported
    shutil.rmtree(scratch)


def main() -> None:
    options = stage.arguments(__doc__.splitlines()[0]).parse_args()
    recipe = Recipe.load(options.recipe)
    located = checkpoint.locate(recipe.checkpoint.source, recipe.checkpoint.sha256)
    export(located, options.out, force=options.force)


if __name__ == "__main__":
    stage.script(main)

"""Stage export: a checkpoint becomes a float32 model, its tokenizer, and what float32 says of known text.

    python build/export.py --recipe build/recipes/smollm2-135m-int8.toml --out DIR

The model is in the format that the recipe's target takes. Only this stage needs torch and transformers. Its outputs
depend on checkpoint and format alone, so recipes share them.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from tritonforge.errors import InvalidCheckpoint

SOURCES = ("export", "checkpoint", "gguf_checkpoint", "sources", "reference", "texts")
FORMAT_SOURCES = {"openvino": ("ir",), "onnx": ("export_onnx", "onnx_step", "onnx_graph")}
PACKAGES = ("python", "torch", "transformers", "tokenizers", "gguf")
FORMAT_PACKAGES = {"openvino": ("optimum", "optimum-intel", "openvino"), "onnx": ("onnx", "onnx-ir", "onnxscript")}


def plan_stage(located: checkpoint.Located, format: str = "openvino") -> stage.Stage:
    """The export of one checkpoint to a model format."""
    return stage.Stage(
        name="export",
        makes=f"float32 {format} model, tokenizer and reference",
        inputs={"checkpoint": located.digest, "texts": texts.digest(texts.QUALITY)},
        settings=settings(located, format),
        packages=PACKAGES + FORMAT_PACKAGES[format],
        sources=tuple(f"build/{name}.py" for name in SOURCES + FORMAT_SOURCES[format]),
    )


def settings(located: checkpoint.Located, format: str) -> dict[str, Any]:
    """The format, and where the checkpoint came from: the files do not depend on that, the manifest says it."""
    return {"format": format, "source": located.source, "revision": located.revision}


def folder_of(located: checkpoint.Located, format: str) -> str:
    """The name of the stage's folder: recipes of one checkpoint and format share it."""
    return f"export-{located.digest[:12]}" if format == "openvino" else f"export-{format}-{located.digest[:12]}"


def inspect(located: checkpoint.Located, format: str) -> checkpoint.Facts:
    """Facts of a checkpoint that can be exported to `format`; InvalidCheckpoint says by name what cannot."""
    facts = checkpoint.inspect(located, format)
    if format == "onnx":
        import export_onnx

        export_onnx.check(config_of(located))
    return facts


def export(located: checkpoint.Located, out: Path, *, format: str = "openvino", force: bool = False) -> stage.Done:
    """Make `out` from a located checkpoint; the record's measurements hold its facts as `model`."""

    def make(folder: Path) -> dict[str, Any]:
        facts = inspect(located, format)
        say("loads the checkpoint")
        model = load(located)
        write_tokenizer(located, folder)
        say("measures the reference")
        measured = reference.write_reference(model, folder)
        if format == "openvino":
            write_openvino(model, folder)
        else:
            import export_onnx

            export_onnx.write(model, folder, say)
        return {"model": dataclasses.asdict(facts), "source": located.source, "revision": located.revision, **measured}

    with progress() as say:
        return stage.run_stage(plan_stage(located, format), out, make, force=force)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that prints a line of progress, also while a stage sends what libraries print to its log."""
    with os.fdopen(os.dup(1), "w") as terminal:
        yield lambda line: print(f"export    {line} ...", file=terminal, flush=True)


def where(located: checkpoint.Located) -> tuple[Path, dict[str, Any]]:
    """How transformers is told where a checkpoint lies. Custom code is never run, nothing is fetched."""
    shared = {"trust_remote_code": False, "local_files_only": True}
    if located.is_gguf:
        return located.path.parent, {"gguf_file": located.path.name, **shared}
    return located.path, shared


def config_of(located: checkpoint.Located) -> Any:
    """The transformers configuration of a checkpoint; InvalidCheckpoint when transformers does not know its model."""
    from transformers import AutoConfig

    home, options = where(located)
    try:
        return AutoConfig.from_pretrained(home, **options)
    except (ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise InvalidCheckpoint(f"transformers cannot read the configuration of {located.source}: {reason}") from None


def load(located: checkpoint.Located) -> Any:
    """The float32 torch model of a checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    home, options = where(located)
    if not located.is_gguf:
        options["use_safetensors"] = True
    return AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32, **options).eval()


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
    export(located, options.out, format=recipe.format, force=options.force)


if __name__ == "__main__":
    stage.script(main)

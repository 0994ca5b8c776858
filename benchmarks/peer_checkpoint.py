"""Writes a recipe's checkpoint for the peers of benchmarks.peers: a Hugging Face folder in bfloat16.

    .venv-build/bin/python benchmarks/peer_checkpoint.py --out DIR [--recipe build/recipes/smollm2-135m-bf16.toml]

The weights are those that our release was built from; llama.cpp's own converter makes a GGUF file of the folder.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "build")]

import checkpoint  # noqa: E402
import export  # noqa: E402
from checkout import RECIPES  # noqa: E402
from recipe import Recipe  # noqa: E402


def main() -> None:
    """Load the checkpoint as the export stage does and save it."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPES / "smollm2-135m-bf16.toml")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    recipe = Recipe.load(options.recipe)
    located = checkpoint.locate(recipe.checkpoint.source, recipe.checkpoint.sha256)
    export.load(located).to(torch.bfloat16).save_pretrained(options.out)
    export.write_tokenizer(located, options.out)


if __name__ == "__main__":
    main()

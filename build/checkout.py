"""Puts the repository root on sys.path, so that `python build/<script>.py` finds the tritonforge package beside it.

Every build script imports this module first; it also says where the repository's own folders are.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "build" / "data"
RECIPES = ROOT / "build" / "recipes"
MODEL_REPOSITORY = ROOT / "model_repository"
CHECKPOINTS = ROOT / "artifacts" / "checkpoints"
WORK = ROOT / "artifacts" / "build"
RELEASES = ROOT / "artifacts" / "releases"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

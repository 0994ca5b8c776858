"""What the tests that need torch share; run them in the build environment."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "build"), str(ROOT / "tests" / "build")]

from tiny_checkpoint import write_checkpoint  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A tiny Llama checkpoint, shared by tests that only read it."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "llama")

"""A second release for tests: the files of another one, with one limit changed, so that its digest is its own."""

import json
import os
import shutil
from pathlib import Path

from tritonforge.release import MANIFEST, Release, write_manifest

DECODER = Path("model_repository/decoder/1")


HANGS = "    def initialize(self, args):\n        import threading\n\n        threading.Event().wait()\n"
"""A decoder that never gets ready."""


def sibling(release_dir: Path, root: Path, *, engine: bytes | None = None, hangs: bool = False) -> Path:
    """Make it in `root`, of hard links where nothing changes. `engine` takes the place of the engine's graph; one that
    `hangs` never ends to load."""
    given = Release.open(release_dir)
    shutil.copytree(release_dir, root, copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__", MANIFEST))
    config = json.loads((root / DECODER / "decoder.json").read_text())
    config["scheduler"]["max_waiting"] += 1
    _replace(root / DECODER / "decoder.json", json.dumps(config).encode())
    if engine is not None:
        _replace(root / DECODER / "engine" / "openvino_model.xml", engine)
    if hangs:
        code = (root / DECODER / "model.py").read_text()
        changed = code.replace("    def initialize(self, args):\n", HANGS)
        assert changed != code
        _replace(root / DECODER / "model.py", changed.encode())
    facts = {name: value for name, value in given.manifest.items() if name not in ("format", "name", "digest", "files")}
    write_manifest(root, name=root.name, **facts)
    return root


def spoil(root: Path) -> Path:
    """Change a file of it, as if on a failing disk; the release that it was made of keeps its own."""
    path = root / DECODER / "decoder.json"
    _replace(path, b"{}")
    return path


def _replace(path: Path, content: bytes) -> None:
    """Write a new file: what a link leads to belongs to another release."""
    path.unlink()
    path.write_bytes(content)

"""A second release for tests: the files of another one, with one limit changed, so that its digest is its own."""

import json
import os
import shutil
from pathlib import Path

from tritonforge.release import MANIFEST, Release, write_manifest

DECODER = Path("model_repository/decoder/1")


def sibling(release_dir: Path, root: Path, *, engine: bytes | None = None) -> Path:
    """Make it in `root`, of hard links where nothing changes. `engine` takes the place of the engine's graph."""
    given = Release.open(release_dir)
    shutil.copytree(release_dir, root, copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__", MANIFEST))
    config = json.loads((root / DECODER / "decoder.json").read_text())
    config["scheduler"]["max_waiting"] += 1
    _replace(root / DECODER / "decoder.json", json.dumps(config).encode())
    if engine is not None:
        _replace(root / DECODER / "engine" / "openvino_model.xml", engine)
    facts = {name: value for name, value in given.manifest.items() if name not in ("format", "name", "digest", "files")}
    write_manifest(root, name=root.name, **facts)
    return root


def _replace(path: Path, content: bytes) -> None:
    """Write a new file: what a link leads to belongs to another release."""
    path.unlink()
    path.write_bytes(content)

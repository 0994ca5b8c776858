"""A variant of a release: the same files but for a few, with a manifest of its own, so that it serves like any other.

Sweeps serve other scheduler limits this way, rehearsals serve what is broken. Unchanged files are hard links where the
file system allows, so a variant takes no space; they are never written to.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritonforge.release import MANIFEST, Release, list_files, write_manifest

DECODER_CONFIG = "model_repository/decoder/1/decoder.json"
COMPUTED = ("format", "name", "digest", "files")


def make_variant(
    release: Release, out: Path, files: Mapping[str, bytes], *, name: str | None = None, facts: Mapping[str, Any] = {}
) -> Release:
    """The release in the new folder `out`, with `files` (relative path: content) in place of its own.

    `facts` replace those of the manifest. Raises OSError when `out` cannot be written.
    """
    link_files(release.root, out)
    for path, content in files.items():
        replace_file(out / path, content)
    kept = {key: value for key, value in release.manifest.items() if key not in COMPUTED}
    return write_manifest(out, name=name or release.name, **{**kept, **facts})


def link_files(root: Path, out: Path) -> None:
    """Make `out` hold the files of `root` but its manifest: links, or copies on another file system."""
    for path in list_files(root, ignore=(MANIFEST,)):
        target = out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(root / path, target)
        except OSError:
            shutil.copyfile(root / path, target)


def replace_file(path: Path, content: bytes) -> None:
    """Write a new file in the place of `path`: what the old one shares with a release is not touched."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def decoder_config(release: Release) -> dict[str, Any]:
    """decoder.json of a release."""
    return json.loads((release.root / DECODER_CONFIG).read_text(encoding="utf-8"))


def with_limits(release: Release, out: Path, limits: Mapping[str, int], *, name: str) -> Release:
    """A variant with other scheduler limits, in decoder.json and in the recipe that the manifest shows."""
    config = decoder_config(release)
    config["scheduler"] |= limits
    recipe = json.loads(json.dumps(release.manifest.get("recipe", {})))
    recipe.setdefault("limits", {}).update(limits)
    content = (json.dumps(config, indent=2) + "\n").encode()
    return make_variant(release, out, {DECODER_CONFIG: content}, name=name, facts={"recipe": recipe})

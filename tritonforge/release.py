"""The release manifest: which files make a release, their digests, and the facts of the build that made them.

The build writes it last, the decoder and the command line verify a release against it. It knows nothing of models,
recipes or Triton; it imports the standard library only, because the serving Python reads it.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonforge.errors import NotFound, ReleaseMismatch

MANIFEST = "manifest.json"
FORMAT = 1
MODEL_REPOSITORY = "model_repository"
POINTER = "release_folder"
"""The file of a composed repository that says where a version's files are."""
REQUIRED = ("format", "name", "digest", "files")


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value that digests are taken over: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest_of(value: Any) -> str:
    """sha256 (hex) over the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(root: Path, *, ignore: tuple[str, ...] = ()) -> list[str]:
    """Relative POSIX paths of everything in `root` that is not a directory, sorted.

    `__pycache__` folders (Python writes them beside a served model.py) and the paths named in `ignore` are left out.
    A link counts as a file, also when it leads to a directory: nothing can hide behind it.
    """
    found = []
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = [name for name in folders if name != "__pycache__" and name not in links]
        found += [Path(folder, name).relative_to(root).as_posix() for name in files + links]
    return sorted(set(found) - set(ignore))


def describe_files(root: Path, *, ignore: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """{relative path: {"sha256": hex, "bytes": size}} of the files in `root`; links raise ReleaseMismatch."""
    described = {}
    for name in list_files(root, ignore=ignore):
        path = root / name
        if path.is_symlink():
            raise ReleaseMismatch(f"{name} is a link; only plain files can be part of a release")
        described[name] = {"sha256": file_digest(path), "bytes": path.stat().st_size}
    return described


def content_digest(files: Mapping[str, Mapping[str, Any]]) -> str:
    """One sha256 (hex) for a set of described files: over the canonical JSON of {relative path: sha256}."""
    return digest_of({name: facts["sha256"] for name, facts in files.items()})


def verify_files(root: Path, files: Mapping[str, Mapping[str, Any]], *, ignore: tuple[str, ...] = ()) -> None:
    """Compare `root` with described `files`; ReleaseMismatch names the first missing, foreign or changed file.

    Names and sizes are compared before any file is read.
    """
    present = set(list_files(root, ignore=ignore))
    for name in sorted(set(files) - present):
        raise ReleaseMismatch(f"{name} is missing from {root}; the manifest lists it")
    for name in sorted(present - set(files)):
        raise ReleaseMismatch(f"{name} is foreign to {root}; the manifest does not list it")
    for name, facts in files.items():
        path = root / name
        if path.is_symlink():
            raise ReleaseMismatch(f"{name} of {root} was replaced by a link")
        size = path.stat().st_size
        if size != facts["bytes"]:
            raise ReleaseMismatch(f"{name} of {root} was changed: it has {size} bytes, not {facts['bytes']}")
    for name, facts in files.items():
        found = file_digest(root / name)
        if found != facts["sha256"]:
            raise ReleaseMismatch(f"{name} of {root} was changed: its sha256 is {found}, not {facts['sha256']}")


@dataclass(frozen=True)
class Release:
    """A release folder with its parsed manifest. Opening checks the manifest, `verify` checks the files."""

    root: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> "Release":
        """Read the manifest of the release at `path`.

        Raises NotFound when there is no release, and ReleaseMismatch when its manifest is broken.
        """
        root = Path(path).absolute()
        file = root / MANIFEST
        if not file.is_file():
            raise NotFound(f"no release at {root}: it has no {MANIFEST}, so it was never built or never finished")
        return cls(root, _parse(file))

    @property
    def name(self) -> str:
        """The name of the recipe that made the release."""
        return self.manifest["name"]

    @property
    def digest(self) -> str:
        """sha256 (hex) over {relative path: sha256}: two releases with the same digest serve the same bytes."""
        return self.manifest["digest"]

    @property
    def model_repository(self) -> Path:
        """The folder to hand to `tritonserver --model-repository`."""
        return self.root / MODEL_REPOSITORY

    def verify(self) -> None:
        """Compare every file with the manifest; ReleaseMismatch names the changed, missing or foreign file."""
        verify_files(self.root, self.manifest["files"], ignore=(MANIFEST,))


def version_folder(arguments: Mapping[str, str]) -> Path:
    """The folder with a model's files, from the arguments of its initialize(): where it lies in its release.

    A repository composed of several releases has nothing but the model's code and the path of that folder.
    """
    folder = Path(arguments["model_repository"]) / arguments["model_version"]
    pointer = folder / POINTER
    return Path(pointer.read_text(encoding="utf-8")) if pointer.exists() else folder


def write_manifest(root: str | Path, *, name: str, **facts: Any) -> Release:
    """Describe the files of `root` and write its manifest, atomically and as the last file; return the release.

    `facts` are JSON values of the build: recipe, checkpoint, tools, quality, sizes and the like.
    """
    root = Path(root).absolute()
    clash = sorted(set(facts) & {"format", "digest", "files"})
    if clash:
        raise ValueError(f"the manifest computes {', '.join(clash)} itself")
    files = describe_files(root, ignore=(MANIFEST,))
    manifest = {"format": FORMAT, "name": name, "digest": content_digest(files), **facts, "files": files}
    partial = root / f"{MANIFEST}.partial"
    partial.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, root / MANIFEST)
    return Release(root, manifest)


def _parse(file: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReleaseMismatch(f"{file} is not valid JSON: {error}") from None
    missing = [key for key in REQUIRED if not isinstance(manifest, dict) or key not in manifest]
    if missing:
        raise ReleaseMismatch(f"{file} lacks {', '.join(missing)}")
    if manifest["format"] != FORMAT:
        raise ReleaseMismatch(f"{file} has format {manifest['format']!r}; this program reads format {FORMAT}")
    try:
        digest = content_digest(manifest["files"])
        sizes = [int(facts["bytes"]) for facts in manifest["files"].values()]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ReleaseMismatch(f"{file}: files must map each path to its sha256 and bytes") from None
    if digest != manifest["digest"] or min(sizes, default=0) < 0:
        raise ReleaseMismatch(f"{file}: the digest does not match the listed files, so the manifest was edited")
    return manifest

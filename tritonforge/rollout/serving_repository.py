"""The model repository that a tritonserver serves: releases side by side as versions. A release is never written to.

The rollout composes it, in the run folder of each server that is started.

    tokenizer/config.pbtxt   1000000/model.py, release_folder   999999/...   a version each, which says where its releis
    decoder/config.pbtxt     1000000/model.py, release_folder   999999/...
    llm/config.pbtxt         1000000/                           an ensemble whose steps are pinned to that version
    llm_canary/config.pbtxt  999999/                            while there is a canary

A version's files are not linked here: Triton looks through links at the times of what they lead to, and loads a version
again when one has changed, if only in its number of links.
Numbers go down: a call without a version gets the highest, which is the stable release also while a canary is loaded.
"""

import contextlib
import json
import os
import py_compile
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tritonforge.errors import ReleaseMismatch
from tritonforge.release import POINTER, Release, version_folder
from tritonforge.rollout.routing import DIGEST, NAME, STABLE_MODEL, VERSION

COMPONENTS = ("tokenizer", "decoder")
FIRST_VERSION = 1_000_000
RELEASED = "1"
"""The version folder of each model within a release."""
CONFIG = "config.pbtxt"
CODE = "model.py"
_OPEN = "model_version: -1"


@dataclass(frozen=True)
class Version:
    """A release under the number by which it is served."""

    number: int
    release: Release


class ServingRepository:
    """The repository in `root`, which is made anew for one stable version."""

    def __init__(self, root: Path, stable: Version) -> None:
        self.root = root
        for model in (*COMPONENTS, STABLE_MODEL):
            (root / model).mkdir(parents=True)
        self._configs = {model: _config(stable.release, model) for model in COMPONENTS}
        self.add(stable)
        self.serve(stable)
        self.point(STABLE_MODEL, stable)

    def check(self, release: Release) -> None:
        """Raises ReleaseMismatch when `release` cannot be a version beside those that are served."""
        for model, text in self._configs.items():
            if _config(release, model) != text:
                rule = (
                    f"{CONFIG} of {model} is not the one of the release that is served, so one server cannot hold both"
                )
                raise ReleaseMismatch(f"{release.name}: {rule}; serve it with a server of its own")

    def add(self, version: Version) -> None:
        """Add a version. It is not served yet."""
        for model in COMPONENTS:
            source = version.release.model_repository / model / RELEASED
            folder = self.root / model / str(version.number)
            folder.mkdir()
            (folder / POINTER).write_text(str(source), encoding="utf-8")
            with contextlib.suppress(FileNotFoundError):  # the load tells what is missing
                shutil.copyfile(source / CODE, folder / CODE)
                _check_code(version.release, model, folder / CODE)
            _compile(folder / CODE)

    def serve(self, *versions: Version) -> None:
        """Say which versions of tokenizer and decoder are to be loaded."""
        for model, text in self._configs.items():
            self._write(model, text + _policy(*versions))

    def point(self, model: str, version: Version, parameters: Mapping[str, str] | None = None) -> None:
        """Make the ensemble `model` that of `version`; `parameters` are told in its configuration."""
        text = _config(version.release, STABLE_MODEL)
        named = f'name: "{STABLE_MODEL}"\n'
        if text.count(_OPEN) != len(COMPONENTS) or not text.startswith(named):
            rule = f'must be named "{STABLE_MODEL}" and leave the versions of its {len(COMPONENTS)} steps open'
            raise ReleaseMismatch(f"{version.release.name}: {CONFIG} of {STABLE_MODEL} {rule}")
        text = text.replace(named, f'name: "{model}"\n', 1).replace(_OPEN, f"model_version: {version.number}")
        told = {DIGEST: version.release.digest, NAME: version.release.name, VERSION: str(version.number)}
        text += "".join(_parameter(name, value) for name, value in {**told, **(parameters or {})}.items())
        (self.root / model / str(version.number)).mkdir(parents=True, exist_ok=True)
        self._write(model, text + _policy(version))

    def drop(self, model: str) -> None:
        """Remove an ensemble that is not loaded."""
        shutil.rmtree(self.root / model, ignore_errors=True)

    def _write(self, model: str, text: str) -> None:
        """At once, and with no other file in the model's folder: Triton reloads a model whose folder gets one."""
        partial = self.root.parent / f"{self.root.name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self.root / model / CONFIG)


def _config(release: Release, model: str) -> str:
    try:
        return (release.model_repository / model / CONFIG).read_text(encoding="utf-8")
    except OSError as error:
        raise ReleaseMismatch(f"{release.name}: {CONFIG} of {model} cannot be read: {error.strerror}") from None


def _check_code(release: Release, model: str, code: Path) -> None:
    """A model that looks for its files beside its code would not find them here."""
    if version_folder.__name__ not in code.read_text(encoding="utf-8"):
        rule = f"its {model} was assembled by an older version of this project, and finds its files only by itself"
        raise ReleaseMismatch(f"{release.name}: {rule}; assemble it again with build/release.py")


def _compile(source: Path) -> None:
    """Put the bytecode there beforehand: a version whose folder changed after it was loaded would be loaded again."""
    with contextlib.suppress(OSError, py_compile.PyCompileError):  # the load tells what is wrong
        py_compile.compile(str(source), doraise=True)


def _policy(*versions: Version) -> str:
    return f"version_policy {{ specific {{ versions: [ {', '.join(str(v.number) for v in versions)} ] }} }}\n"


def _parameter(name: str, value: str) -> str:
    return f"parameters {{ key: {json.dumps(name)} value {{ string_value: {json.dumps(value)} }} }}\n"

"""What a server keeps about its releases over restarts of the launcher: which is stable, and which was before it.

One JSON file when the operator names a folder for it; else it lives as long as the launcher.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from tritonforge.errors import EngineFailure, ReleaseMismatch, SetupError, TritonForgeError
from tritonforge.release import Release

FILE = "rollout.json"
_KEYS = {"given", "stable", "previous"}


class RolloutState:
    """The stable release, and the one before it. The rollout is its only writer."""

    def __init__(self, given: Release, folder: Path | None = None) -> None:
        """`given` is the release that the operator names at the start.

        It is stable at first. A folder that remembers a promotion which began with the same release goes on from there;
        one that began with another release starts over: whoever changed what is given wants that served.
        """
        self._given, self._file = given, None if folder is None else folder / FILE
        self.stable, self.previous = given, None
        if self._file is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SetupError(f"--state {folder} cannot be made: {error.strerror}; name another folder") from None
            self._read()

    def reopen(self) -> Release:
        """The stable release as it is on disk now: its folder may have been built again while it was served."""
        with contextlib.suppress(TritonForgeError):  # it is being changed: the load tells what is wrong
            self.stable = Release.open(self.stable.root)
        return self.stable

    def promote(self, release: Release) -> None:
        """`release` is stable from now on. EngineFailure, and nothing changes, when that cannot be written down."""
        self._write(release, self.stable)
        self.stable, self.previous = release, self.stable

    def forget_previous(self) -> None:
        """There is nothing to return to: the release that would be was just taken back."""
        self.previous = None
        self._write(self.stable, None)

    def _read(self) -> None:
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except OSError as error:
            raise SetupError(f"{self._file} cannot be read: {error.strerror}; give its folder to this user") from None
        except ValueError:
            kept = None
        if not _is_state(kept):
            rule = f"must have the keys {sorted(_KEYS)}, each release with a path and a digest"
            raise ReleaseMismatch(f"{self._file} {rule}; remove it to start over")
        if kept["given"] == self._given.digest:
            self.stable = _open(kept["stable"])
            with contextlib.suppress(TritonForgeError):  # it is gone: there is nothing to return to
                self.previous = None if kept["previous"] is None else _open(kept["previous"])

    def _write(self, stable: Release, previous: Release | None) -> None:
        if self._file is None:
            return
        kept = {
            "given": self._given.digest,
            "stable": _told(stable),
            "previous": None if previous is None else _told(previous),
        }
        partial = self._file.with_suffix(".partial")
        try:
            with open(partial, "w", encoding="utf-8") as file:
                file.write(json.dumps(kept, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())  # after a power failure it is the old file or the new one, not an empty one
            os.replace(partial, self._file)
        except OSError as error:
            raise EngineFailure(f"{self._file} cannot be written: {error.strerror}") from None


def _told(release: Release) -> dict[str, str]:
    return {"path": str(release.root), "digest": release.digest}


def _is_state(kept: Any) -> bool:
    """Whether this is what _write() wrote, by its form."""
    if not isinstance(kept, dict) or set(kept) != _KEYS:
        return False
    releases = [kept["stable"], *([] if kept["previous"] is None else [kept["previous"]])]
    return all(
        isinstance(one, dict) and set(one) == {"path", "digest"} and all(isinstance(text, str) for text in one.values())
        for one in releases
    )


def _open(kept: dict[str, str]) -> Release:
    release = Release.open(kept["path"])
    if release.digest != kept["digest"]:
        raise ReleaseMismatch(f"{release.root} is another release than when it was promoted; serve it with --release")
    return release

"""Notices that a release's files change while it is served: weights that are mapped into memory change with their file.

A file whose size or time has changed is read and compared with the manifest, in a thread of its own: the supervisor
must go on seeing deaths meanwhile. It asks now and then; nothing is read while nothing changes.
"""

import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tritonforge.release import MANIFEST, Release, file_digest

LOOK_S = 1.0
"""Least time between two looks at the files."""

log = logging.getLogger("tritonforge.server")

Stamp = tuple[int, int, int] | None
Served = tuple[Path, str]
"""A release's folder and digest: another release may come in the same folder."""


class Change(NamedTuple):
    """A served release whose file is not what its manifest says, in words."""

    release: Release
    text: str


class ReleaseWatch:
    """Compares the served releases with what they were when they were first watched."""

    def __init__(self, releases: Iterable[Release]) -> None:
        self._stamps: dict[Served, dict[str, Stamp] | None] = {}
        self._found: dict[Served, str] = {}
        self._reading: threading.Thread | None = None
        self._next_look = 0.0
        self.follow(releases)

    def follow(self, releases: Iterable[Release]) -> None:
        """Watch these from now on. Those that were watched before are still compared with what they were then."""
        known = self._stamps
        self._releases = {(release.root, release.digest): release for release in releases}
        self._stamps = {
            served: known[served] if served in known else _stamps(release) for served, release in self._releases.items()
        }

    def look(self, now: float) -> list[Change]:
        """What is known at `now` (monotonic seconds) to be changed: one file of each release."""
        if now >= self._next_look and (self._reading is None or not self._reading.is_alive()):
            self._next_look = now + LOOK_S
            changed = [(one, names) for served, one in self._releases.items() if (names := self._changed(served))]
            if changed:
                self._reading = threading.Thread(target=self._read, args=(changed,), name="release-watch", daemon=True)
                self._reading.start()
        return [Change(self._releases[one], text) for one, text in list(self._found.items()) if one in self._releases]

    def _changed(self, served: Served) -> list[str]:
        """The files whose size or time is another; none of a release that was replaced as a whole."""
        before = self._stamps[served]
        if before is None:
            return []
        now = _stamps(self._releases[served])
        if before[MANIFEST] != now[MANIFEST]:
            log.warning("another release was put in the place of %s; what was loaded is served on", served[0])
            self._stamps[served] = None
            return []
        self._stamps[served] = now
        return [name for name in now if before[name] != now[name]]

    def _read(self, changed: list[tuple[Release, list[str]]]) -> None:
        for release, names in changed:
            for name in names:
                wrong = _wrong(release, name)
                if wrong is not None:
                    text = f"{name} of {release.root} {wrong} while it was served"
                    self._found[release.root, release.digest] = text


def _stamps(release: Release) -> dict[str, Stamp]:
    return {name: _stamp(release.root / name) for name in (MANIFEST, *release.manifest["files"])}


def _stamp(path: os.PathLike) -> Stamp:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _wrong(release: Release, name: str) -> str | None:
    """In which way a file is not what the manifest says; None when it is."""
    path, facts = release.root / name, release.manifest["files"][name]
    try:
        same = path.stat().st_size == facts["bytes"] and file_digest(path) == facts["sha256"]
    except OSError:
        return "was removed"
    return None if same else "was changed"

"""Notices that a release's files change while it is served: weights that are mapped into memory change with their file.

A file whose size or time has changed is read and compared with the manifest, in a thread of its own: the supervisor
must go on seeing deaths meanwhile. It asks now and then; nothing is read while nothing changes.
"""

import logging
import os
import threading
from collections.abc import Iterable

from tritonforge.release import MANIFEST, Release, file_digest

LOOK_S = 1.0
"""Least time between two looks at the files."""

log = logging.getLogger("tritonforge.server")

Stamp = tuple[int, int, int] | None


class ReleaseWatch:
    """Compares the served releases with what they were when the watch was made."""

    def __init__(self, releases: Iterable[Release]) -> None:
        self._releases = tuple(releases)
        self._stamps = {release.root: _stamps(release) for release in self._releases}
        self._found: str | None = None
        self._reading: threading.Thread | None = None
        self._next_look = 0.0

    def look(self, now: float) -> str | None:
        """Which file is not any more what the manifest says, at `now` (monotonic seconds); None while none is known."""
        if self._found is None and now >= self._next_look and (self._reading is None or not self._reading.is_alive()):
            self._next_look = now + LOOK_S
            changed = [(release, names) for release in self._releases if (names := self._changed(release))]
            if changed:
                self._reading = threading.Thread(target=self._read, args=(changed,), name="release-watch", daemon=True)
                self._reading.start()
        return self._found

    def _changed(self, release: Release) -> list[str]:
        """The files whose size or time is another; none of a release that was replaced as a whole."""
        before, now = self._stamps[release.root], _stamps(release)
        if before == now:
            return []
        self._stamps[release.root] = now
        if before[MANIFEST] != now[MANIFEST]:
            log.warning("another release was put in the place of %s; what was loaded is served on", release.root)
            self._releases = tuple(one for one in self._releases if one is not release)
            return []
        return [name for name in now if before[name] != now[name]]

    def _read(self, changed: list[tuple[Release, list[str]]]) -> None:
        for release, names in changed:
            for name in names:
                wrong = _wrong(release, name)
                if wrong is not None:
                    self._found = f"{name} of {release.root} {wrong} while it was served"


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

"""The shared-memory regions of one tritonserver: told apart by a name prefix, removed after a crash.

The Python backend leaves its regions in /dev/shm when its server is killed. A locked owner file says which prefixes
belong to a living supervisor, in whatever container it lives; what nobody owns any more is removed by the next start.
"""

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from typing import TextIO

SHM = Path("/dev/shm")
FAMILY = "tritonforge-"
_OWNER = ".owner"


class SharedMemory:
    """Owns the regions whose names start with `prefix`, and notes `run_dir` so that it goes with them."""

    def __init__(self, run_dir: Path) -> None:
        self.prefix = f"{FAMILY}{uuid.uuid4().hex[:12]}"
        self._owner = SHM / f"{self.prefix}{_OWNER}"
        unseen = self._owner.with_name(f".{self._owner.name}")
        self._lock = open(unseen, "x")  # noqa: SIM115 - held until close()
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._lock.write(str(run_dir))
        self._lock.flush()
        unseen.rename(self._owner)  # only now does sweep() see it: complete and locked

    def remove_regions(self) -> None:
        """Remove all regions of this prefix. Only called when no process uses them any more."""
        for path in _regions(self.prefix):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the regions and give up the prefix. Idempotent."""
        self.remove_regions()
        self._owner.unlink(missing_ok=True)
        self._lock.close()


def sweep() -> None:
    """Remove regions and run folders whose owner died without cleaning up (killed with SIGKILL)."""
    for owner in SHM.glob(f"{FAMILY}*{_OWNER}"):
        with contextlib.suppress(OSError), _open_mine(owner) as lock:  # another user's, being swept, or still owned
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            run_dir = Path(lock.read())
            for path in _regions(owner.name.removesuffix(_OWNER)):
                path.unlink(missing_ok=True)
            if run_dir.name.startswith(FAMILY) and run_dir.stat().st_uid == os.getuid():
                shutil.rmtree(run_dir, ignore_errors=True)
            owner.unlink(missing_ok=True)


def _open_mine(owner: Path) -> TextIO:
    """Open an owner file of this user; OSError for anything else. The folder is open to all, and what a file there
    names is deleted."""
    lock = open(os.open(owner, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))  # noqa: SIM115 - the caller closes it
    facts = os.fstat(lock.fileno())
    if not S_ISREG(facts.st_mode) or facts.st_uid != os.getuid():
        lock.close()
        raise PermissionError(f"{owner} is not a file of this user")
    return lock


def _regions(prefix: str) -> Iterator[Path]:
    return (path for path in SHM.glob(f"{prefix}*") if not path.name.endswith(_OWNER))

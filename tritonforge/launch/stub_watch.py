"""Notices a Python stub that halts while its server goes on: it has not ended, so nobody else does anything about it.

Triton then answers every request for its model with an error, for good (seen with 2.51). A server that halts while its
stubs go on answers nobody. The supervisor asks twice a second; the process table is all that is looked at, so no
request and no counter shows it.
"""

from collections.abc import Iterable
from pathlib import Path

LOOK_S = 0.5
"""How often to look."""
HALTED_S = 2.0
"""How long a process may halt: Triton itself has given a stub up after a second."""


class HaltWatch:
    """Looks at one server's stubs. A server that halts with them, as in a paused container, goes on with them too."""

    def __init__(self, server: int, stubs: Iterable[int]) -> None:
        self._server, self._stubs = server, tuple(stubs)
        self._since: dict[int, float] = {}

    def look(self, now: float) -> int | None:
        """The process that has halted while the others go on, at `now` (monotonic seconds); None while none has."""
        halted = {pid: is_halted(pid) for pid in (self._server, *self._stubs)}
        for pid in halted:
            if not halted[pid] or all(halted.values()) or (pid != self._server and halted[self._server]):
                self._since.pop(pid, None)
            elif now - self._since.setdefault(pid, now) >= HALTED_S:
                return pid
        return None


def is_halted(pid: int) -> bool:
    """Whether a process was stopped by a signal; one that has ended is not halted."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] == "T"

"""Why a running server must be replaced: a process ended or halted, a step hangs, the release was changed on disk.

The supervisor looks twice a second. What is found is a Cause: a kind for the metrics, and words for the log.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from tritonforge.launch.release_watch import ReleaseWatch
from tritonforge.launch.stub_watch import HaltWatch
from tritonforge.launch.triton_process import TritonProcess
from tritonforge.release import Release


class Cause(NamedTuple):
    """Why a server is replaced: a kind of metrics_health.RESTART_CAUSES, and a sentence."""

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


GiveUp = Callable[[Release, str], bool]


def refuse_to(release: Release, why: str) -> bool:
    """No release can be given up."""
    return False


class ServerWatch:
    """Looks at one server, its stubs and the releases that it serves.

    `give_up` is asked, each time, whether the server can go on without a release that was changed: so with a canary.
    """

    def __init__(
        self, process: TritonProcess, stubs: Iterable[int], releases: Iterable[Release], give_up: GiveUp = refuse_to
    ) -> None:
        self._process, self._give_up = process, give_up
        self._releases = ReleaseWatch(())
        self.follow(stubs, releases)

    def follow(self, stubs: Iterable[int], releases: Iterable[Release]) -> None:
        """Look at these from now on; what is known of a release that stays is kept."""
        self._halts = HaltWatch(self._process.pid, stubs)
        self._releases.follow(releases)

    def look(self, now: float) -> Cause | None:
        """What is wrong at `now` (monotonic seconds); None while nothing is."""
        hung = self._process.hung()
        if hung is not None:
            return Cause("step_hung", f"the engine hangs: {hung}")
        halted = self._halts.look(now)
        if halted is not None:
            return _halt(halted, self._process.pid)
        for changed in self._releases.look(now):
            if not self._give_up(changed.release, changed.text):
                return Cause("release_changed", changed.text)
        return None


def _halt(pid: int, server: int) -> Cause:
    if pid == server:
        return Cause("server_halted", f"tritonserver (pid {pid}) has halted")
    return Cause("stub_halted", f"the Python stub of pid {pid} has halted")


def cause_of_end(process: TritonProcess, stubs: Mapping[int, int], ended: set[int]) -> Cause:
    """Which process ended; `stubs` maps a pidfd to its pid, `ended` are pidfds (none: nothing did)."""
    if process.pidfd in ended:
        return Cause("server_ended", f"tritonserver (pid {process.pid}) ended with code {process.exit_code()}")
    pids = ", ".join(str(stubs[pidfd]) for pidfd in ended)
    return Cause("stub_died", f"the Python stub of pid {pids} died" if pids else "a stop was asked for")


def watch_stubs(stubs: dict[int, int], pids: Iterable[int], leaving: Collection[int] = ()) -> None:
    """Have `stubs` map a pidfd to each of `pids` too, and to none of `leaving`, whose pidfds are closed.

    One that died since stays in it: only so is its death seen.
    """
    for pidfd, pid in list(stubs.items()):
        if pid in leaving:
            os.close(pidfd)
            del stubs[pidfd]
    for pid in set(pids) - set(stubs.values()) - set(leaving):
        pidfd = open_pidfd(pid)
        if pidfd is not None:
            stubs[pidfd] = pid


def open_pidfd(pid: int) -> int | None:
    """A file descriptor that becomes readable when the process ends; None when it has ended already."""
    with contextlib.suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return None

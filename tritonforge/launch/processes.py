"""Processes of this user, by /proc: which there are, how they were started, and how to end one."""

import contextlib
import os
import select
import signal
from pathlib import Path

KILL_S = 10.0


def pids() -> list[int]:
    """Processes of this user: a command line says whatever its process likes."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and is_mine(path)]


def is_mine(path: Path) -> bool:
    """Whether a file exists and belongs to this user."""
    with contextlib.suppress(OSError):  # gone meanwhile, or a link to nothing
        return path.stat().st_uid == os.getuid()
    return False


def command_line(pid: int) -> str:
    """The command line of a process; empty for a zombie or one that is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().decode(errors="replace")
    return ""


def kill_and_wait(pid: int) -> None:
    """Kill a process and wait, for KILL_S at most, until it has ended. Raises ProcessLookupError without one."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], KILL_S)
    finally:
        os.close(pidfd)

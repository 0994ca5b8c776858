"""Faults that a profile does to the server under load, on the machine that serves; the walk calls them.

Only processes below the given server process are touched.
"""

import contextlib
from collections.abc import Callable

import psutil

from loadtests.contract import Profile
from loadtests.fields import InvalidContract

STUB, DECODER = "triton_python_backend_stub", "/decoder/"


def decoder_process(server_pid: int) -> psutil.Process:
    """The process in which the decoder runs, found below the server's. Raises InvalidContract when there is none."""
    try:
        family = psutil.Process(server_pid).children(recursive=True)
    except psutil.Error as error:
        raise InvalidContract(f"server_pid must be a running process, got {server_pid}: {error}") from None
    for process in family:
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if line and STUB in line[0] and any(DECODER in word for word in line):
                return process
    raise InvalidContract(f"server_pid must be a server's with a decoder below it, got {server_pid}")


def fault_of(profile: Profile, server_pid: int | None) -> Callable[[], None] | None:
    """What does the profile's fault, or None. Raises InvalidContract when the server's process is not known."""
    if profile.fault is None:
        return None
    if server_pid is None:
        raise InvalidContract(f"{profile.id} kills the decoder: give --server-pid, the process that serves")
    process = decoder_process(server_pid)

    def kill() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

    return kill


def rss_bytes(server_pid: int) -> int:
    """Resident bytes of a server and all below it."""
    try:
        root = psutil.Process(server_pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error as error:
        raise InvalidContract(f"server_pid must be a running process, got {server_pid}: {error}") from None
    total = 0
    for process in family:
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total

"""Tells the decoder that it is about to stop: files that the supervisor writes and the decoder watches.

Triton alone goes on accepting gRPC requests after SIGTERM while any HTTP connection is open, even an idle one. With
this the decoder refuses new requests at once, and says when the running ones have ended. Standard library only.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

VARIABLE = "TRITONFORGE_DRAIN_FILE"
"""Environment variable of tritonserver and its stubs; absent when no supervisor started them."""
TAKEN_BACK = "taken_back"
"""A file beside it: how many canaries the supervisor has taken back."""
POLL_S = 0.1
ORPHANED = 71
HUNG_S = 10.0
"""A process that runs no Python for so long is ended by the kernel, with SIGALRM. A call into Triton that was under way
when the server died never returns, and keeps the interpreter's lock: then no thread here could see the death."""


class DrainFile:
    """The supervisor's end: `ask` the decoders to drain, then see whether they are `done`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, timeout_s: float) -> None:
        """Ask to refuse new requests, and to cancel what still runs after `timeout_s` seconds."""
        _write(self._path, f"{timeout_s}")

    def ask_one(self, pid: int, timeout_s: float) -> None:
        """Ask only the decoder with this process id."""
        _write(_own(self._path, pid), f"{timeout_s}")

    def done(self, pids: Iterable[int]) -> bool:
        """True once the decoders with these process ids have handed over every answer."""
        return all(_done(self._path, pid).exists() for pid in pids)


def on_drain(drain: Callable[[float], None], *, end_orphan: Callable[[int], None] = os._exit) -> None:
    """The decoder's end: when asked, call `drain` once, with its timeout in seconds, in a thread of its own.

    `drain` returns when every answer was handed over. The thread also ends this process when tritonserver has died: a
    model that is finalized then may wait for it for ever. Nothing happens where no supervisor started the server.
    """
    if VARIABLE in os.environ:
        arguments = (Path(os.environ[VARIABLE]), drain, end_orphan)
        threading.Thread(target=_watch, args=arguments, name="drain-watch", daemon=True).start()


def count_taken_back(run_dir: Path, count: int) -> None:
    """Have the decoders' metrics tell how many canaries the supervisor has taken back."""
    _write(run_dir / TAKEN_BACK, f"{count}")


def taken_back() -> int:
    """What count_taken_back() told this decoder; 0 where no supervisor started the server."""
    try:
        return int(Path(os.environ[VARIABLE]).with_name(TAKEN_BACK).read_text(encoding="utf-8"))
    except (KeyError, OSError, ValueError):
        return 0


def _watch(path: Path, drain: Callable[[float], None], end_orphan: Callable[[int], None]) -> None:
    parent, pause, asked = os.getppid(), threading.Event(), False
    while os.getppid() == parent:
        signal.setitimer(signal.ITIMER_REAL, HUNG_S)
        pause.wait(POLL_S)
        found = None if asked else next((one for one in (path, _own(path, os.getpid())) if one.exists()), None)
        if found is not None:
            asked = True  # in a thread of its own: the parent may die while it drains
            threading.Thread(target=_drain, args=(path, found, drain), name="drain", daemon=True).start()
    end_orphan(ORPHANED)


def _drain(path: Path, asked: Path, drain: Callable[[float], None]) -> None:
    drain(float(asked.read_text(encoding="utf-8")))
    _done(path, os.getpid()).touch()


def _write(path: Path, text: str) -> None:
    """At once: a reader sees nothing or all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def _own(path: Path, pid: int) -> Path:
    return path.with_suffix(f".of-{pid}")


def _done(path: Path, pid: int) -> Path:
    return path.with_suffix(f".done-{pid}")

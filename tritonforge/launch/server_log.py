"""Where one tritonserver and its stubs write their log: a file, or what is none, as a pipe, a terminal or the stdout.

A file is read back when it is asked what was written. Anything else gets the log through a thread that keeps the
beginning and the end of it. TritonProcess owns it.
"""

import contextlib
import os
import select
import threading
from pathlib import Path
from stat import S_ISREG

from tritonforge.errors import EngineFailure

KEPT = 1 << 16
"""Bytes of the beginning, and of the end, that are kept of a log that cannot be read back."""
CATCH_UP_S = 1.0
"""How long the thread may take to pass on what an ended server wrote."""
_CHUNK = 1 << 16
_STANDARD = {"/dev/stdout": 1, "/dev/stderr": 2}
"""Inherited as they are: to open one anew fails for a socket, and for another user's pipe."""


class ServerLog:
    """The log of one server. `fd` is what the server's output goes to until `started` is called."""

    def __init__(self, path: Path) -> None:
        """Opens `path` to append. Raises EngineFailure when that fails, also for a pipe that nobody reads."""
        self._path, self._thread = path, None
        try:
            target = _open(path)
        except OSError as error:
            raise EngineFailure(f"log file {path} cannot be written: {error.strerror}") from None
        facts = os.fstat(target)
        self._begin = facts.st_size
        self.fd = target if S_ISREG(facts.st_mode) else self._pass_on(target)

    def started(self) -> None:
        """The server has inherited `fd`, or there will be none: from now on only the server writes. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def text(self) -> str:
        """What this server has written, to what is no file at most 2 * KEPT bytes of it."""
        if self._thread is not None:
            self._thread.join(CATCH_UP_S)  # it ends with the last process that writes
            return bytes(self._head + self._tail).decode(errors="replace")
        with contextlib.suppress(OSError), open(self._path, "rb") as log:
            log.seek(self._begin)
            return log.read().decode(errors="replace")
        return ""

    def close(self) -> None:
        """Wait a moment until all is passed on; the writers have ended. Idempotent."""
        self.started()
        if self._thread is not None:
            self._thread.join(CATCH_UP_S)

    def _pass_on(self, target: int) -> int:
        self._head, self._tail = bytearray(), bytearray()
        source, writer = os.pipe()
        self._thread = threading.Thread(target=self._copy, args=(source, target), name="server-log", daemon=True)
        self._thread.start()
        return writer

    def _copy(self, source: int, target: int) -> None:
        """Until the last writer has ended. What cannot be written is let go of: the server must not wait for it."""
        try:
            while chunk := os.read(source, _CHUNK):
                kept = KEPT - len(self._head)
                self._head += chunk[:kept]
                self._tail = (self._tail + chunk[kept:])[-KEPT:]
                with contextlib.suppress(OSError):  # its reader has gone
                    _write(target, chunk)
        finally:
            os.close(source)
            os.close(target)


def _open(path: Path) -> int:
    standard = _STANDARD.get(str(path))
    if standard is not None:
        return os.dup(standard)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY
    target = os.open(path, flags | os.O_NONBLOCK, 0o666)  # without it a pipe that nobody reads would be waited for
    os.set_blocking(target, True)
    return target


def _write(target: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:  # whoever shares it has made it so
            select.select((), (target,), ())

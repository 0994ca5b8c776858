"""How commands reach the launcher of a running server: a Unix socket in Linux's abstract namespace.

It is named by the address and gRPC port of the server.

It leaves no file behind. It has no permissions either, so both ends ask the kernel who the other is: only the same user
(or root) is answered. One JSON object a line in each direction.
"""

import json
import logging
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from typing import Any

from tritonforge import errors
from tritonforge.errors import InvalidRequest, Overloaded, SetupError, TritonForgeError
from tritonforge.launch.ports import LOOPBACK, reachable

log = logging.getLogger("tritonforge.server")
MAX_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 5.0
_CREDENTIALS = struct.Struct("3i")
_RAISED = (InvalidRequest, errors.NotFound, Overloaded, errors.Cancelled, errors.DeadlineExceeded)
_BY_CODE: dict[str, type[TritonForgeError]] = {kind.code: kind for kind in (*_RAISED, errors.EngineFailure)}

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class ControlSocket:
    """The launcher's end: answers each request with what `handle` returns or raises, each in a thread."""

    def __init__(self, port: int, handle: Handler, *, address: str = LOOPBACK) -> None:
        """Raises SetupError when the name is taken."""
        try:
            self._server = _Server(_name(port, address), handle)
        except OSError as error:
            raise SetupError(f"the control socket of gRPC port {port} is taken: {error.strerror}") from None
        threading.Thread(target=self._server.serve_forever, name="control", daemon=True).start()

    def close(self) -> None:
        """Answer no more requests."""
        self._server.shutdown()
        self._server.server_close()


def ask(port: int, request: dict[str, Any], timeout: float, *, address: str = LOOPBACK) -> dict[str, Any]:
    """Send `request` to the launcher of the server that is bound to this address and gRPC port; return its answer.

    Raises the typed error of the launcher, and Overloaded when there is none.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(_name(port, address))
            if not _is_mine(connection):
                raise SetupError(f"the control socket of gRPC port {port} belongs to another user")
            connection.settimeout(timeout)
            connection.sendall(json.dumps(request).encode() + b"\n")
            line = connection.makefile("rb").readline()
        except TimeoutError:
            raise Overloaded(
                f"the launcher gave no answer within {timeout:g} s; it may still carry the command out"
            ) from None
        except OSError as error:
            remedy = (
                "start it with `tritonforge serve`, on this machine and by this user, or name its --port and --address"
            )
            raise Overloaded(f"no server is controlled on gRPC port {port} ({error.strerror}); {remedy}") from None
    if not line.endswith(b"\n"):
        raise Overloaded("the launcher closed the connection without an answer; it may still carry the command out")
    answer = json.loads(line)
    if "error" in answer:
        raise _BY_CODE.get(answer["code"], errors.EngineFailure)(answer["error"])
    return answer


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def __init__(self, name: str, handle: Handler) -> None:
        self.handle = handle
        super().__init__(name, _Connection)

    def verify_request(self, request: socket.socket, client_address: Any) -> bool:
        """Whether this peer is answered at all."""
        return _is_mine(request)


class _Connection(socketserver.StreamRequestHandler):
    timeout = CONNECT_TIMEOUT_S

    def handle(self) -> None:
        try:
            line = self.rfile.readline(MAX_BYTES)
            self.connection.settimeout(None)
            answer = _answer(self.server.handle, line)
            self.wfile.write(json.dumps(answer).encode() + b"\n")
        except OSError:
            log.info("a release command went away before its answer")


def _answer(handle: Handler, line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise ValueError("no object")
    except ValueError:
        return {"code": InvalidRequest.code, "error": "a command must be one JSON object on one line"}
    try:
        return handle(request)
    except TritonForgeError as error:
        return {"code": error.code, "error": str(error).removeprefix(f"{error.code}: ")}
    except Exception:
        log.exception("a release command failed")
        return {"code": errors.EngineFailure.code, "error": "the command failed; the launcher's log has the cause"}


def _name(port: int, address: str) -> str:
    host = reachable(address)
    return f"\0tritonforge-{port}" if host in (LOOPBACK, "localhost") else f"\0tritonforge-{host}-{port}"


def _is_mine(connection: socket.socket) -> bool:
    """Whether the other end belongs to this process's user or to root."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1] in (os.getuid(), 0)

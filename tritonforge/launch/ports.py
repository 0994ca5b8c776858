"""The three ports of a server: given, or chosen among the free ones; checked before anything is started."""

import ipaddress
import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from tritonforge.errors import InvalidRequest, SetupError

LOOPBACK = "127.0.0.1"
_ANY = {"0.0.0.0": LOOPBACK, "::": "::1"}


@dataclass(frozen=True)
class Ports:
    """TCP ports; 0 means a free one."""

    grpc: int = 8001
    http: int = 8000
    metrics: int = 8002

    def __post_init__(self) -> None:
        for name, port in asdict(self).items():
            if not 0 <= port <= 65535:
                raise InvalidRequest(f"{name} port must be in [0, 65535], got {port}")
        given = [port for port in asdict(self).values() if port]
        if len(set(given)) < len(given):
            raise InvalidRequest(f"the ports must differ, got {asdict(self)}")

    def claim(self, address: str) -> "Ports":
        """Return these ports with free ones in place of 0.

        Raises SetupError, with the remedy, when a given one is busy or `address` is not of this machine.
        """
        with ExitStack() as held:
            return replace(self, **{n: _bind(held, address, n, port) for n, port in asdict(self).items()})


def reachable(address: str) -> str:
    """The host part of a URL by which this machine reaches a server bound to `address`."""
    host = _ANY.get(address, address)
    return f"[{host}]" if ":" in host else host


def is_loopback(url: str) -> bool:
    """True when the host of `host:port` names this machine itself: no proxy lies between, whatever is configured."""
    host = url.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind(held: ExitStack, address: str, name: str, port: int) -> int:
    """Bind until `held` closes, so that no two roles are given one port; return the port."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1)
    except OSError as error:
        remedy = f"free it or choose another with --{name}-port (0: any free one)"
        raise SetupError(f"cannot listen on {name} port {port} of {address}: {error.strerror}; {remedy}") from error
    return listener.getsockname()[1]

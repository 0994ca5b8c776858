"""What the supervisor is doing, in a file that the probe reads: from outside a server that starts looks dead, for both
have closed ports. Standard library only.

The file lies in the temporary folder, under the address and HTTP port of the server, and goes with its supervisor: two
servers may have one port on different addresses.
"""

import contextlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

FAMILY = "tritonforge-state-"
CONTROL_FAMILY = "tritonforge-log-"
ANY_ADDRESS = ("0.0.0.0", "::")
_SAME = {"localhost": "127.0.0.1"}


@dataclass(frozen=True)
class Told:
    """A supervisor's last word: its state, why it came to that ("" for nothing special), and since when (Unix time)."""

    state: str
    cause: str
    since_s: float
    pid: int
    born: int

    @property
    def alive(self) -> bool:
        """Whether the supervisor that said it still runs."""
        return birth(self.pid) == self.born


def state_path(http_port: int, address: str = "127.0.0.1") -> Path:
    """Where the supervisor of the server that is bound to this address and HTTP port tells its state."""
    return _path(FAMILY, http_port, address)


def control_path(http_port: int, address: str = "127.0.0.1") -> Path:
    """Where the logging of the server that is bound to this address and HTTP port is changed."""
    return _path(CONTROL_FAMILY, http_port, address)


def find_state(url: str) -> tuple[Told, Path] | None:
    """What the supervisor told last whose server answers at `url` (host:port), and where its logging is changed.

    None when nobody has told anything. A server that is bound to every address has the port for itself, so at most one
    of those that may be meant is alive.
    """
    host, _, port = url.rpartition(":")
    found = []
    for address in (host, *ANY_ADDRESS):
        told = read_state(state_path(int(port), address))
        if told is not None:
            found.append((told, control_path(int(port), address)))
    return next((one for one in found if one[0].alive), found[0] if found else None)


def write_state(path: Path, state: str, cause: str = "") -> None:
    """Tell that this process is in `state` now; a reader sees the old word or the new one, whole."""
    pid = os.getpid()
    word = {"state": state, "cause": cause, "since_s": time.time(), "pid": pid, "born": birth(pid)}
    put(path, json.dumps(word))


def put(path: Path, text: str) -> None:
    """Write a file at once; never through a link that is there already, for the folder is open to all."""
    partial = path.with_suffix(f".{os.getpid()}")
    partial.unlink(missing_ok=True)
    with open(partial, "x", encoding="utf-8") as file:
        file.write(text)
    partial.rename(path)


def read_state(path: Path) -> Told | None:
    """What was told last; None when nobody has told anything."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:
            return Told(**json.loads(file.read())) if is_trusted(os.fstat(file.fileno())) else None
    except (OSError, ValueError, TypeError):
        return None


def is_trusted(facts: os.stat_result) -> bool:
    """Whether a file of the temporary folder may be heeded: a plain one, of this user or of root."""
    return S_ISREG(facts.st_mode) and facts.st_uid in (0, os.getuid())


def remove_state(path: Path) -> None:
    """Forget it, unless another process has told something there since."""
    told = read_state(path)
    if told is not None and told.pid == os.getpid():
        _unlink(path)


def sweep_states() -> None:
    """Remove what supervisors left that were killed."""
    folder = Path(tempfile.gettempdir())
    for path in folder.glob(f"{FAMILY}*.json"):
        told = read_state(path)
        if told is None or not told.alive:
            _unlink(path)


def _path(family: str, port: int, address: str) -> Path:
    host = _SAME.get(address, address).strip("[]").replace("/", "_")
    return Path(tempfile.gettempdir()) / f"{family}{host}-{port}.json"


def _unlink(path: Path) -> None:
    """Remove a state file, and what changes the logging of the same server."""
    control = path.with_name(path.name.replace(FAMILY, CONTROL_FAMILY))
    for file in (path, control):
        with contextlib.suppress(OSError):  # there is none, it is another user's, or swept meanwhile
            file.unlink()


def birth(pid: int) -> int:
    """When a process was started, in clock ticks since boot; 0: there is none. It gives away a reused process id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    fields = stat.rsplit(")", 1)[1].split()
    return 0 if fields[0] == "Z" else int(fields[19])

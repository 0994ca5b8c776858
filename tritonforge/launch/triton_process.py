"""One tritonserver process and its Python stubs: start, wait until ready, stop, kill, clean up.

The supervisor thread owns it. It knows nothing of releases, restarts or what the models do.
"""

import contextlib
import http.client
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tritonforge.errors import EngineFailure
from tritonforge.launch.drain import VARIABLE, DrainFile
from tritonforge.launch.model_control import restrictions
from tritonforge.launch.ports import Ports, reachable
from tritonforge.launch.processes import command_line, is_mine, kill_and_wait, pids
from tritonforge.launch.server_log import ServerLog
from tritonforge.launch.shared_memory import FAMILY, SharedMemory
from tritonforge.launch.state_file import birth
from tritonforge.launch.triton_install import STUB, TritonInstall
from tritonforge.observation.health import stall_file
from tritonforge.observation.observation import Observation
from tritonforge.observation.recorder import VARIABLE as BUCKETS_VARIABLE

OPEN_FILES = 65536
"""Least limit of open files, where the hard limit allows it: each connection takes one, and all clients share them."""
_GUARD = """import ctypes, os, resource, sys
ctypes.CDLL(None).prctl(1, 9)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
wanted = int(sys.argv[2]) if hard < 0 else min(int(sys.argv[2]), hard)
if 0 <= soft < wanted: resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
if os.getppid() == int(sys.argv[1]): os.execv(sys.argv[3], sys.argv[3:])"""
"""Asks the kernel for SIGKILL when the parent thread dies (PR_SET_PDEATHSIG) and for files, then becomes the server."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs of this machine, whatever proxy the environment names."""
KEEPALIVE = {"keepalive-time": 60_000, "keepalive-timeout": 20_000}
KEEPALIVE |= {"keepalive-permit-without-calls": 1, "http2-max-pings-without-data": 0}
"""A gRPC connection without traffic is pinged, and closed when nobody answers. Triton's default: after 2 hours."""
_FORWARD_TRACEPARENT = tuple(f"--{api}-header-forward-pattern=(?i)traceparent" for api in ("http", "grpc"))
"""Makes a parameter of the header by which services hand on a trace."""
_LOAD_ERROR = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<cause>.*)\"")
_CONFIG_ERROR = re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<cause>.*?)\"?$", re.MULTILINE)
_PARSE_ERROR = re.compile(r"Error parsing text-format inference\.ModelConfig: (?P<cause>.*)$", re.MULTILINE)
_FATAL = re.compile(r"^error: (?P<cause>.*)$|^E\d{4} .*?\] \"?(?P<logged>.*?)\"?$", re.MULTILINE)


@dataclass(frozen=True)
class ServerConfig:
    """What one tritonserver is started with.

    `compose` makes the model repository in the server's run folder and returns it. `drain_timeout_s` is what running
    requests get after SIGTERM. `key` opens the APIs that are closed to clients.
    """

    compose: Callable[[Path], Path]
    ports: Ports
    address: str
    drain_timeout_s: float
    key: str = field(repr=False)
    log_file: Path | None = None
    histogram_buckets: Path | None = None
    observe: Observation = field(default_factory=Observation)

    def arguments(self, model_repository: Path, shm_prefix: str) -> Sequence[str]:
        """The server's command line, without the binary and its backend folder.

        Readiness is that of the server: a version that loads, drains or failed to load says nothing of the others.
        """
        return (
            f"--model-repository={model_repository}",
            "--model-control-mode=explicit",
            "--load-model=*",
            "--strict-readiness=false",
            *restrictions(self.key),
            f"--grpc-address={self.address}",
            f"--grpc-port={self.ports.grpc}",
            f"--http-address={self.address}",
            f"--http-port={self.ports.http}",
            f"--metrics-address={self.address}",
            f"--metrics-port={self.ports.metrics}",
            f"--exit-timeout-secs={max(1, round(self.drain_timeout_s))}",
            f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
            "--disable-auto-complete-config",
            *(f"--grpc-{name}={value}" for name, value in KEEPALIVE.items()),
            *(_FORWARD_TRACEPARENT if self.observe.otlp_endpoint else ()),
        )


class TritonProcess:
    """A running tritonserver. The thread that creates it must outlive it: its death kills the server."""

    def __init__(
        self, install: TritonInstall, config: ServerConfig, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it, or leave nothing. `environment` has variables for it and its stubs beside those of this process."""
        self.config = config
        self._process: subprocess.Popen | None = None
        self._log: ServerLog | None = None
        self.pidfd = -1
        self._retired: dict[int, int] = {}
        self._run_dir = Path(tempfile.mkdtemp(prefix=FAMILY))
        self._memory = SharedMemory(self._run_dir)
        self._folders_before = _backend_folders()
        self._backend_folder: Path | None = None
        self._drain_file = DrainFile(self._run_dir / "drain")
        try:
            self._start(install, environment or {})
        except BaseException:
            self.close()
            raise

    def _start(self, install: TritonInstall, environment: Mapping[str, str]) -> None:
        config = self.config
        variables = {**environment, **config.observe.environment(), VARIABLE: str(self._run_dir / "drain")}
        if config.histogram_buckets is not None:
            variables[BUCKETS_VARIABLE] = str(config.histogram_buckets.absolute())
        repository = config.compose(self._run_dir)
        arguments = [*install.lay_out(self._run_dir), *config.arguments(repository, self._memory.prefix)]
        self._log = ServerLog(config.log_file or self._run_dir / "server.log")
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _GUARD, str(os.getpid()), str(OPEN_FILES), str(install.binary), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log.fd,
            stderr=subprocess.STDOUT,
            env=install.environment(self._run_dir) | variables,
            start_new_session=True,  # Ctrl-C in a terminal reaches the supervisor only, which drains
        )
        self._log.started()
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """The process id of tritonserver."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """How the server ended (negative: by this signal), None while it runs."""
        return self._process.poll()

    def is_ready(self) -> bool:
        """True when the server answers that it and all its models are ready; whatever else answers there is not."""
        url = f"http://{reachable(self.config.address)}:{self.config.ports.http}/v2/health/ready"
        try:
            with _DIRECT.open(url, timeout=1) as answer:
                return answer.status == 200
        except (OSError, http.client.HTTPException, ValueError):
            return False

    def stub_pids(self) -> list[int]:
        """Process ids of the Python stubs, found by our region names on their command lines: so also when orphaned."""
        return [pid for pid in pids() if self._memory.prefix in (line := command_line(pid)) and STUB in line]

    def stubs_of(self, version: int, model: str = "") -> list[int]:
        """The stubs of one version, or of one model of it."""
        return [pid for pid in self.stub_pids() if f"{model}/{version}/model.py" in command_line(pid)]

    def retire(self, version: int) -> None:
        """Expect the stubs of a version to end: its models are about to be unloaded."""
        self._retired |= {pid: birth(pid) for pid in self.stubs_of(version)}

    @property
    def retired_stubs(self) -> set[int]:
        """Those that were retired; not a later process that was given the id of one."""
        return {pid for pid, born in self._retired.items() if birth(pid) in (0, born)}

    def kill(self, version: int) -> None:
        """Kill the stubs of a version, which may hang: Triton then fails the load that waits for one."""
        for pid in self.stubs_of(version):
            with contextlib.suppress(ProcessLookupError):
                kill_and_wait(pid)

    def refuse(self, version: int) -> None:
        """Ask the decoder of a version to refuse requests from now on, and to cancel those that run."""
        for pid in self.stubs_of(version, "decoder"):
            self._drain_file.ask_one(pid, 0.0)

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that this server wrote."""
        return "\n".join(self._log.text().splitlines()[-lines:])

    def failure(self) -> EngineFailure:
        """Why the server ended or does not get ready, in one line, from its log."""
        log = self._log.text()
        failed = _LOAD_ERROR.search(log)
        if failed:
            cause = failed["cause"].split("\\n\\nAt:")[0].removeprefix("Internal: ").replace("\\n", " ")
            return EngineFailure(f"model {failed['model']} does not load: {cause}")
        unreadable = _CONFIG_ERROR.search(log)
        if unreadable:
            where = _PARSE_ERROR.search(log)
            detail = f" ({where['cause']})" if where else ""
            return EngineFailure(f"model {unreadable['model']} does not load: {unreadable['cause']}{detail}")
        fatal = [found["cause"] or found["logged"] for found in _FATAL.finditer(log)]
        code = self.exit_code()
        state = "does not get ready" if code is None else f"ended with code {code}"
        return EngineFailure(f"tritonserver {state}" + (f": {fatal[-1]}" if fatal else f"; its log says: {log[-500:]}"))

    def drain(self) -> None:
        """Ask the decoder and Triton to refuse new requests and finish the running ones; Triton then exits."""
        with contextlib.suppress(OSError):  # a full disk: Triton alone drains not as promptly, but it drains
            self._drain_file.ask(self.config.drain_timeout_s)
        self._process.terminate()

    @property
    def drained(self) -> bool:
        """True once every decoder has handed over its answers. One that does not say so is never drained."""
        return self._drain_file.done([pid for pid in self.stub_pids() if "/decoder/" in command_line(pid)])

    def hung(self) -> str | None:
        """What the decoder says of a step that hangs; None while none does."""
        try:
            return stall_file(self._run_dir / "drain").read_text(encoding="utf-8")
        except OSError:
            return None

    def note_backend_folder(self) -> None:
        """Remember the folder that the Python backend made in /tmp. Called when the server has just become ready."""
        made = _backend_folders() - self._folders_before
        self._backend_folder = made.pop() if len(made) == 1 else None

    def close(self) -> None:
        """Kill what still runs, remove regions and folders: nothing of this server is left. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for pid in self.stub_pids():
            with contextlib.suppress(ProcessLookupError):
                kill_and_wait(pid)
        self._memory.close()
        if self._log is not None:
            self._log.close()
        if self._backend_folder is not None:
            with contextlib.suppress(OSError):  # removed by a clean exit, or not empty and so not ours
                self._backend_folder.rmdir()
        shutil.rmtree(self._run_dir, ignore_errors=True)
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _backend_folders(folder: Path = Path("/tmp")) -> set[Path]:
    return {path for path in folder.glob("python_env_*") if is_mine(path)}

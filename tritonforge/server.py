"""Serves a release on the real tritonserver: the class that the command line, tests and benchmarks use.

It opens the release, claims the ports and hands the rest to the supervisor. It knows no terminal and no signals.
"""

from pathlib import Path
from types import TracebackType

from tritonforge.client import connect, generate, infer_request
from tritonforge.errors import EngineFailure
from tritonforge.ports import LOOPBACK, Ports, reachable
from tritonforge.release import Release
from tritonforge.shared_memory import sweep
from tritonforge.supervisor import RestartPolicy, State, Supervisor
from tritonforge.triton_install import find_triton
from tritonforge.triton_process import ServerConfig

PROBE_MODEL = "llm"
PROBE_TIMEOUT_S = 60.0
STARTUP_TIMEOUT_S = 180.0
DRAIN_TIMEOUT_S = 30.0
CLOSE_S = 30.0


class Server:
    """A supervised tritonserver on a release. A context manager: it serves inside the block, nothing is left after it.

    Ports of 0 become free ones. Raises NotFound or ReleaseMismatch for what is no release, SetupError for what this
    machine lacks, and EngineFailure, with the model's own message, when the release does not load.
    """

    def __init__(
        self,
        release: Path | str,
        *,
        ports: Ports | None = None,
        address: str = LOOPBACK,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
        startup_timeout_s: float = STARTUP_TIMEOUT_S,
        log_file: Path | None = None,
        histogram_buckets: Path | None = None,
        tritonserver: Path | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self.release = Release.open(release)
        install = find_triton(tritonserver)
        self.ports = (ports or Ports(0, 0, 0)).claim(address)
        self.host = reachable(address)
        config = ServerConfig(
            self.release.model_repository, self.ports, address, drain_timeout_s, log_file, histogram_buckets
        )
        self._timeout_s = startup_timeout_s + PROBE_TIMEOUT_S
        self._stop_timeout_s = drain_timeout_s + CLOSE_S
        self._supervisor = Supervisor(
            install,
            config,
            self._generate_one_token,
            startup_timeout_s=startup_timeout_s,
            policy=policy,
        )

    @property
    def grpc_url(self) -> str:
        """host:port, as tritonclient wants it."""
        return f"{self.host}:{self.ports.grpc}"

    @property
    def http_url(self) -> str:
        """host:port of the HTTP endpoint."""
        return f"{self.host}:{self.ports.http}"

    @property
    def metrics_url(self) -> str:
        """host:port of the Prometheus metrics."""
        return f"{self.host}:{self.ports.metrics}"

    @property
    def state(self) -> State:
        """What the server does now."""
        return self._supervisor.state

    @property
    def pid(self) -> int:
        """The process id of the present tritonserver; a restart changes it."""
        return self._supervisor.process.pid

    def stub_pids(self) -> list[int]:
        """The process ids of the present Python stubs, one a model instance."""
        return self._supervisor.process.stub_pids()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the server's log."""
        return self._supervisor.process.log_tail(lines)

    def start(self) -> "Server":
        """Start and wait until one token was really generated; raises what made it fail."""
        sweep()
        self._supervisor.start()
        try:
            self.wait_for(State.SERVING, State.STOPPED, timeout_s=self._timeout_s)
        except BaseException:  # also KeyboardInterrupt: a server that never served is not left running
            self.stop(force=True)
            raise
        return self

    def wait_for(self, *states: State, timeout_s: float | None = None) -> State:
        """Wait until the server is in one of `states` and return it; raises EngineFailure when it has failed."""
        final = (*states, State.FAILED)
        with self._supervisor.changed:
            if not self._supervisor.changed.wait_for(lambda: self.state in final, timeout_s):
                raise EngineFailure(f"the server is still {self.state.value} after {timeout_s:g} s")
            state, error = self.state, self._supervisor.error
        if state is State.FAILED and error is not None:
            raise error
        return state

    def ask_stop(self, *, force: bool = False) -> None:
        """Begin to drain (`force`: kill what runs) and return at once; a signal handler may call it."""
        self._supervisor.ask_stop(force=force)

    def stop(self, *, force: bool = False) -> None:
        """Drain and stop: new requests are refused, running ones finish within the drain timeout. Idempotent."""
        if self._supervisor.is_alive():
            self.ask_stop(force=force)
            self._supervisor.join(self._stop_timeout_s)

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _generate_one_token(self) -> None:
        with connect(self.grpc_url) as channel:
            generate(channel, infer_request(PROBE_MODEL, text="Hello", max_tokens=1), PROBE_TIMEOUT_S)

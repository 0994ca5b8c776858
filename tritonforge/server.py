"""Serves a release on the real tritonserver: the class that the command line, tests and benchmarks use.

It opens the release, claims the ports and hands the rest to the supervisor. It knows no terminal and no signals.
"""

from dataclasses import replace
from pathlib import Path
from types import TracebackType

from tritonforge.errors import EngineFailure
from tritonforge.launch.control_socket import ControlSocket
from tritonforge.launch.model_control import new_key
from tritonforge.launch.ports import LOOPBACK, Ports, reachable
from tritonforge.launch.probe import Condition, Target, generate_token
from tritonforge.launch.shared_memory import sweep
from tritonforge.launch.state_file import control_path, remove_state, state_path, sweep_states, write_state
from tritonforge.launch.supervisor import RestartPolicy, State, Supervisor
from tritonforge.launch.triton_install import find_triton
from tritonforge.launch.triton_process import ServerConfig
from tritonforge.observation.observation import Observation
from tritonforge.release import Release
from tritonforge.rollout.commands import CommandTable
from tritonforge.rollout.rollout import GRACE_S, Rollout
from tritonforge.rollout.room import check_room
from tritonforge.rollout.running_server import RunningServer
from tritonforge.rollout.state import RolloutState

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
        observe: Observation | None = None,
        state: Path | None = None,
        route_grace_s: float = GRACE_S,
    ) -> None:
        """`state` is a folder that remembers promotions; without one a new Server starts with `release`.

        `route_grace_s` is how long a version stays loaded when the route no longer leads to it.
        """
        kept = RolloutState(Release.open(release), state)
        install, key = find_triton(tritonserver), new_key()
        self.ports = (ports or Ports(0, 0, 0)).claim(address)
        self._address, self.host = address, reachable(address)
        self._running = RunningServer(self.grpc_url, key, startup_timeout_s)
        self._rollout = Rollout(kept, self._running, grace_s=route_grace_s, check_room=check_room)
        config = ServerConfig(
            self._rollout.compose,
            self.ports,
            address,
            drain_timeout_s,
            key,
            log_file,
            histogram_buckets,
            replace(observe or Observation(), log_control=control_path(self.ports.http, address)),
        )
        self._state_path = state_path(self.ports.http, address)
        self._timeout_s = startup_timeout_s + PROBE_TIMEOUT_S
        self._stop_timeout_s = drain_timeout_s + CLOSE_S
        self._supervisor = Supervisor(
            install,
            config,
            self._generate_one_token,
            startup_timeout_s=startup_timeout_s,
            policy=policy,
            releases=self._rollout.releases,
            give_up=self._rollout.give_up,
            tell=self._tell,
        )
        self._running.supervisor = self._supervisor
        self._control: ControlSocket | None = None

    @property
    def release(self) -> Release:
        """The stable release; a promotion changes it."""
        return self._rollout.release

    @property
    def rollout(self) -> Rollout:
        """Its commands try, promote and take back releases."""
        return self._rollout

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
        sweep_states()
        self._control = ControlSocket(self.ports.grpc, CommandTable(self._rollout), address=self._address)
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
        if self._control is not None:
            self._control.close()
            self._control = None
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
        verdict = generate_token(Target(self.http_url, self.metrics_url), PROBE_TIMEOUT_S)
        if verdict.condition is not Condition.READY:
            raise EngineFailure(verdict.cause)

    def _tell(self, state: State, cause: str) -> None:
        """Have the probe know what the supervisor does."""
        if state in (State.STOPPED, State.FAILED):
            remove_state(self._state_path)
        else:
            write_state(self._state_path, state.value, cause)

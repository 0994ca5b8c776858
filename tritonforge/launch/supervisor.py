"""Keeps a tritonserver serving: starts it, watches it, replaces it when it or one of its Python stubs dies.

Triton leaves the streams of a dead stub open for ever and stays ready, so the whole server is killed: its clients get
an error at once, its ports are closed until the next one serves. `Server` talks to this thread; nobody else.
"""

import contextlib
import enum
import json
import logging
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tritonforge.errors import EngineFailure, Overloaded, TritonForgeError
from tritonforge.launch.server_watch import Cause, GiveUp, ServerWatch, cause_of_end, refuse_to, watch_stubs
from tritonforge.launch.stub_watch import LOOK_S
from tritonforge.launch.triton_install import TritonInstall
from tritonforge.launch.triton_process import ServerConfig, TritonProcess
from tritonforge.observation.metrics_health import RESTARTS_VARIABLE
from tritonforge.release import Release

log = logging.getLogger("tritonforge.server")
POLL_S = 0.05
UNLOAD_S = 5.0
"""What the server gets on top of the drain timeout to unload its models; Triton looks at them once a second."""
RENEW_S = 10.0
EXIT_S = 2.0
"""What it gets to exit once its stubs are gone. Sometimes it never does: it keeps waiting for the ensemble (seen)."""


class State(enum.Enum):
    """What the server does now. FAILED and STOPPED are final."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass
class RestartPolicy:
    """How soon a dead server is started again, and when it is given up: after `limit` deaths within `window_s`.

    The first restart is immediate, the following ones wait `first_delay_s`, doubled each time up to `max_delay_s`.
    """

    limit: int = 5
    window_s: float = 120.0
    first_delay_s: float = 1.0
    max_delay_s: float = 10.0
    _deaths: deque[float] = field(default_factory=deque)

    def delay_after_death(self, now: float) -> float | None:
        """Seconds to wait after a death at `now` (monotonic seconds), None to give up."""
        while self._deaths and now - self._deaths[0] > self.window_s:
            self._deaths.popleft()
        self._deaths.append(now)
        earlier = len(self._deaths) - 1
        if earlier >= self.limit:
            return None
        return min(self.first_delay_s * 2 ** (earlier - 1), self.max_delay_s) if earlier else 0.0


class Supervisor(threading.Thread):
    """The one thread that owns the server process. `probe` generates one token or raises a TritonForgeError."""

    def __init__(
        self,
        install: TritonInstall,
        config: ServerConfig,
        probe: Callable[[], None],
        *,
        startup_timeout_s: float,
        policy: RestartPolicy | None = None,
        releases: Callable[[], Sequence[Release]] = tuple,
        give_up: GiveUp = refuse_to,
        tell: Callable[[State, str], None] = lambda state, cause: None,
    ) -> None:
        """`releases` are those that are served; `give_up` as in ServerWatch; `tell` gets each state and its cause."""
        super().__init__(name="supervisor", daemon=True)
        self.error: TritonForgeError | None = None
        self.process: TritonProcess | None = None
        self.state = State.STARTING
        self.changed = threading.Condition()
        self._install, self._config, self._probe = install, config, probe
        self._startup_timeout_s = startup_timeout_s
        self._policy = policy or RestartPolicy()
        self._releases, self._give_up, self._tell = releases, give_up, tell
        self._restarts: Counter[str] = Counter()
        self._stop_asked, self._force_asked = threading.Event(), threading.Event()
        self._renew_asked, self._renewed, self._renewing = threading.Event(), threading.Event(), threading.Lock()
        self._wake, self._wake_sender = socket.socketpair()

    def run(self) -> None:
        """Serve until asked to stop or until the restart policy gives up; leave nothing behind."""
        try:
            self._enter(State.STARTING)
            while not self._stop_asked.is_set():
                self._serve_once()
        except TritonForgeError as error:
            self.error = error
        except Exception as error:
            log.exception("the supervisor failed")
            self.error = EngineFailure(f"the supervisor failed: {error}")
        finally:
            if self.process is not None:
                self.process.close()
            self._wake.close()
            self._wake_sender.close()
            self._enter(State.STOPPED if self.error is None else State.FAILED, str(self.error or ""))

    def ask_stop(self, *, force: bool = False) -> None:
        """Begin to drain, or with `force` stop at once. Does not wait; may be called from a signal handler."""
        self._stop_asked.set()
        if force:
            self._force_asked.set()
        self._nudge()

    def renew_watch(self) -> None:
        """Watch what is served now instead of what was, and return when that is so: versions came or are to go."""
        with self._renewing:  # one at a time: who asks second must not take the first one's renewal for its own
            self._renewed.clear()
            self._renew_asked.set()
            self._nudge()
            if not self._renewed.wait(RENEW_S):
                raise Overloaded(f"the server is {self.state.value}")

    def _serve_once(self) -> None:
        """One life of a server: start, serve, and either drain because it was asked, or die and wait to return."""
        first = self.state is State.STARTING
        restarts = {RESTARTS_VARIABLE: json.dumps(self._restarts)}
        stubs: dict[int, int] = {}
        try:
            self.process = process = TritonProcess(self._install, self._config, restarts)
            watch = ServerWatch(process, (), self._releases(), self._give_up)  # before the decoder reads them
            self._await_ready(process)
            watch_stubs(stubs, process.stub_pids())
            cause = self._serve(process, stubs, watch)
            if self._stop_asked.is_set():
                self._drain(process, stubs)
                return
        except (TritonForgeError, OSError) as error:
            if first:
                raise
            cause = Cause("load_failed", str(error))
        finally:
            watch_stubs(stubs, (), stubs.values())
        self._replace(cause)

    def _await_ready(self, process: TritonProcess) -> None:
        """Wait until Triton is ready, or a stop is asked for. EngineFailure when it ends or takes too long."""
        deadline = time.monotonic() + self._startup_timeout_s
        while not process.is_ready() and not self._stop_asked.is_set():
            self._wait((process.pidfd,), POLL_S)
            if process.exit_code() is not None:
                raise process.failure()
            if time.monotonic() > deadline:
                raise EngineFailure(f"{process.failure()} (waited {self._startup_timeout_s:g} s)")
        process.note_backend_folder()

    def _serve(self, process: TritonProcess, stubs: dict[int, int], watch: ServerWatch) -> Cause:
        """Serve until the server must be replaced or a stop is asked for; say why. EngineFailure without a token."""
        self._await_token(process, stubs)
        if not self._stop_asked.is_set():
            self._enter(State.SERVING)
        watch.follow(stubs.values(), self._releases())
        ended, cause = set(), None
        while not ended and cause is None and not self._stop_asked.is_set():
            if self._renew_asked.is_set():
                self._renew_asked.clear()
                watch_stubs(stubs, process.stub_pids(), process.retired_stubs)
                watch.follow(stubs.values(), self._releases())
                self._renewed.set()
            ended = self._wait((process.pidfd, *stubs), LOOK_S)
            cause = watch.look(time.monotonic())
        return cause_of_end(process, stubs, ended) if ended or cause is None else cause

    def _await_token(self, process: TritonProcess, stubs: dict[int, int]) -> None:
        """Wait until one token was generated or a stop is asked for. The probe has a thread: deaths are seen."""
        outcome: list[Exception | None] = []

        def probe() -> None:
            try:
                self._probe()
                outcome.append(None)
            except Exception as error:
                outcome.append(error)
            self._nudge()

        threading.Thread(target=probe, name="probe", daemon=True).start()
        while not outcome and not self._stop_asked.is_set():
            ended = self._wait((process.pidfd, *stubs))
            if ended:
                raise EngineFailure(f"before the first token, {cause_of_end(process, stubs, ended)}")
        if outcome and outcome[0] is not None:
            raise EngineFailure(f"the first token could not be generated: {outcome[0]}") from outcome[0]

    def _drain(self, process: TritonProcess, stubs: dict[int, int]) -> None:
        """Let the running requests finish and Triton exit; what is left when its time is over is killed."""
        self._enter(State.DRAINING)
        watch_stubs(stubs, process.stub_pids())  # streams of a retired version finish as well
        process.drain()
        deadline = time.monotonic() + self._config.drain_timeout_s + UNLOAD_S
        watched, drained = {process.pidfd, *stubs}, False
        while process.pidfd in watched and time.monotonic() < deadline and not self._force_asked.is_set():
            watched -= self._wait(watched, POLL_S)
            if process.drained and not drained:  # Triton may wait on, for an idle HTTP connection
                drained, deadline = True, min(deadline, time.monotonic() + UNLOAD_S)
            if watched == {process.pidfd} and stubs:  # without stubs nothing runs any more
                stubs, deadline = {}, min(deadline, time.monotonic() + EXIT_S)
        process.close()

    def _replace(self, cause: Cause) -> None:
        """Remove a dead server, wait as the policy says, or give up with EngineFailure."""
        self._restarts[cause.kind] += 1
        self._enter(State.RESTARTING, cause.text)
        delay = self._policy.delay_after_death(time.monotonic())
        self.process.close()
        if delay is None:
            raise EngineFailure(f"gave up after {self._policy.limit} restarts in {self._policy.window_s:g} s: {cause}")
        log.warning("%s; starting a new server%s", cause, f" in {delay:g} s" if delay else "")
        self._stop_asked.wait(delay)

    def _wait(self, pidfds: Iterable[int], timeout_s: float | None = None) -> set[int]:
        """Block until one of `pidfds` ends, ask_stop() is called or the time is over; return those that ended."""
        poll = select.poll()
        for fd in (self._wake.fileno(), *pidfds):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)}
        if (wake := self._wake.fileno()) in ready:
            self._wake.recv(64)
        return ready - {wake}

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended already
            self._wake_sender.send(b"x")

    def _enter(self, state: State, cause: str = "") -> None:
        with contextlib.suppress(OSError):  # a full disk must not stop the service
            self._tell(state, cause)
        with self.changed:
            self.state = state
            self.changed.notify_all()

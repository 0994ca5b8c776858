"""The supervisor with a stand-in for tritonserver: what it does when a process dies, hangs or is stopped."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tritonforge.errors import EngineFailure, Overloaded, ReleaseMismatch
from tritonforge.launch import stub_watch
from tritonforge.launch import supervisor as module
from tritonforge.launch.supervisor import RestartPolicy, State, Supervisor
from tritonforge.observation.metrics_health import RESTARTS_VARIABLE

PROGRAM = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); print(flush=True); time.sleep(60)"


class Standin:
    """Looks like a TritonProcess: a sleeping server and one sleeping stub."""

    made: list["Standin"]
    ready = True
    says_hung = None

    def __init__(self, install, config, environment):
        self.environment = environment
        self.server, self.stub = (self._start() for _ in range(2))
        self.pid, self.pidfd = self.server.pid, os.pidfd_open(self.server.pid)
        self.closed = self.drained = False
        self.retired_stubs = set()
        self.made.append(self)

    def _start(self):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE)
        process.stdout.readline()
        return process

    def exit_code(self):
        return self.server.poll()

    def is_ready(self):
        return self.ready

    def stub_pids(self):
        return [self.stub.pid]

    def hung(self):
        return self.says_hung

    def failure(self):
        return EngineFailure("no luck")

    def note_backend_folder(self):
        pass

    def drain(self):
        self.server.terminate()

    def close(self):
        if not self.closed:
            for process in (self.server, self.stub):
                process.kill()
                process.communicate()
            os.close(self.pidfd)
        self.closed = True


@pytest.fixture
def start(monkeypatch):
    """Starts a supervisor of stand-ins; at the end every stand-in must have been closed."""
    monkeypatch.setattr(Standin, "made", [], raising=False)
    monkeypatch.setattr(module, "TritonProcess", Standin)
    started = []

    def start(probe=lambda: None, policy=None, startup_timeout_s=10.0, **more):
        config = SimpleNamespace(drain_timeout_s=1.0)
        supervisor = Supervisor(None, config, probe, startup_timeout_s=startup_timeout_s, policy=policy, **more)
        started.append(supervisor)
        supervisor.start()
        return supervisor

    yield start
    for supervisor in started:
        supervisor.ask_stop(force=True)
        supervisor.join(10)
        assert not supervisor.is_alive()
    assert all(standin.closed for standin in Standin.made)


def wait_for(supervisor: Supervisor, *states: State, timeout_s=10.0) -> State:
    with supervisor.changed:
        assert supervisor.changed.wait_for(lambda: supervisor.state in states, timeout_s), supervisor.state
        return supervisor.state


def wait_served(supervisor: Supervisor, count: int) -> None:
    deadline = time.monotonic() + 10
    while not (len(Standin.made) == count and supervisor.state is State.SERVING):
        assert time.monotonic() < deadline, (len(Standin.made), supervisor.state)
        time.sleep(0.01)


@pytest.mark.parametrize("victim", ["server", "stub"])
def test_a_death_closes_the_whole_server_and_starts_another(start, victim):
    supervisor = start()
    wait_for(supervisor, State.SERVING)
    first = Standin.made[0]
    getattr(first, victim).kill()
    wait_served(supervisor, 2)
    assert first.closed and not Standin.made[1].closed


def test_a_stub_that_halts_is_a_death(start, monkeypatch):
    """Wrong: Triton refuses its requests for good, and the service is back only when a person looks."""
    monkeypatch.setattr(stub_watch, "HALTED_S", 0.0)
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    supervisor = start()
    wait_served(supervisor, 1)
    os.kill(Standin.made[0].stub.pid, signal.SIGSTOP)
    wait_served(supervisor, 2)
    assert Standin.made[0].closed


def test_a_server_that_halts_with_its_stubs_is_not_dead():
    """Wrong: a container that is paused for a minute would lose its streams when it goes on."""
    with subprocess.Popen(["sleep", "60"]) as server, subprocess.Popen(["sleep", "60"]) as stub:
        watch = stub_watch.HaltWatch(server.pid, [stub.pid])
        for process in (server, stub):
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert watch.look(0.0) is None and watch.look(100.0) is None
        server.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, server.pid, os.WCONTINUED)
        assert watch.look(200.0) is None, "it may follow soon"
        assert watch.look(200.0 + stub_watch.HALTED_S) == stub.pid
        for process in (server, stub):
            process.kill()


def test_a_server_that_halts_while_its_stubs_go_on_is_dead():
    with subprocess.Popen(["sleep", "60"]) as server, subprocess.Popen(["sleep", "60"]) as stub:
        watch = stub_watch.HaltWatch(server.pid, [stub.pid])
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)
        assert watch.look(0.0) is None and watch.look(stub_watch.HALTED_S) == server.pid
        for process in (server, stub):
            process.kill()


def test_a_decoder_that_says_it_hangs_is_replaced_and_the_next_server_is_told_why(start, monkeypatch):
    """Wrong: a hung engine would answer nobody until a person looks, and the metrics would not say what happened."""
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    told = []
    supervisor = start(tell=lambda state, cause: told.append((state, cause)))
    wait_served(supervisor, 1)
    Standin.made[0].says_hung = "a step has taken 30.0 s"
    wait_served(supervisor, 2)
    assert Standin.made[0].closed
    assert (State.RESTARTING, "the engine hangs: a step has taken 30.0 s") in told
    assert [json.loads(one.environment[RESTARTS_VARIABLE]) for one in Standin.made] == [{}, {"step_hung": 1}]


def test_a_state_that_cannot_be_told_stops_nothing(start):
    def tell(state, cause):
        raise OSError("no space left on device")

    wait_for(start(tell=tell), State.SERVING)


def test_too_many_deaths_are_a_failure_that_says_what_died(start):
    supervisor = start(policy=RestartPolicy(limit=1))
    wait_for(supervisor, State.SERVING)
    Standin.made[0].stub.kill()
    wait_served(supervisor, 2)
    Standin.made[1].stub.kill()
    assert wait_for(supervisor, State.FAILED) is State.FAILED
    assert "gave up after 1 restarts" in str(supervisor.error) and "Python stub" in str(supervisor.error)


def test_a_first_start_that_fails_is_not_tried_again(start):
    def probe():
        raise Overloaded("no token")

    supervisor = start(probe)
    wait_for(supervisor, State.FAILED)
    assert "first token could not be generated: UNAVAILABLE: no token" in str(supervisor.error)
    assert len(Standin.made) == 1


def test_a_start_that_hangs_is_given_up_with_the_reason(start, monkeypatch):
    monkeypatch.setattr(Standin, "ready", False)
    supervisor = start(startup_timeout_s=0.2)
    wait_for(supervisor, State.FAILED)
    assert "no luck" in str(supervisor.error) and "waited 0.2 s" in str(supervisor.error)


def test_a_stub_that_dies_while_the_first_token_is_made_is_noticed(start):
    asked, end = threading.Event(), threading.Event()

    def probe():
        asked.set()
        end.wait(30)

    supervisor = start(probe)
    assert asked.wait(10)
    Standin.made[0].stub.kill()
    wait_for(supervisor, State.FAILED)
    end.set()
    assert "before the first token, the Python stub" in str(supervisor.error)


def test_stopping_does_not_wait_for_a_probe_that_hangs(start):
    asked, end = threading.Event(), threading.Event()

    def probe():
        asked.set()
        end.wait(30)

    supervisor = start(probe)
    assert asked.wait(10)
    supervisor.ask_stop()
    wait_for(supervisor, State.STOPPED)
    end.set()


def test_a_drain_ends_with_the_server(start):
    supervisor = start()
    wait_for(supervisor, State.SERVING)
    supervisor.ask_stop()
    wait_for(supervisor, State.STOPPED)
    assert supervisor.error is None and Standin.made[0].server.returncode == 0


def test_a_drained_server_that_does_not_exit_is_killed(start, monkeypatch):
    monkeypatch.setattr(module, "UNLOAD_S", 0.2)
    monkeypatch.setattr(Standin, "drain", lambda self: setattr(self, "drained", True))
    supervisor = start()
    wait_for(supervisor, State.SERVING)
    supervisor.ask_stop()
    wait_for(supervisor, State.STOPPED)
    assert Standin.made[0].server.returncode < 0


@pytest.mark.parametrize("error", [ReleaseMismatch("config.pbtxt cannot be read"), OSError("no space left on device")])
def test_a_server_that_cannot_be_made_anew_is_tried_again(start, monkeypatch, error):
    """Wrong: a stub that dies while its release is rebuilt, or the disk is full, would end the service for good."""
    failing = [error]

    class Flaky(Standin):
        def __init__(self, *arguments):
            if self.made and failing:
                raise failing.pop()
            super().__init__(*arguments)

    monkeypatch.setattr(module, "TritonProcess", Flaky)
    supervisor = start(policy=RestartPolicy(first_delay_s=0.0))
    wait_served(supervisor, 1)
    Standin.made[0].stub.kill()
    wait_served(supervisor, 2)
    assert json.loads(Standin.made[1].environment[RESTARTS_VARIABLE]) == {"stub_died": 1, "load_failed": 1}


def test_two_that_renew_the_watch_at_once_each_wait_for_their_own(start, monkeypatch):
    """Wrong: a rollback that ends the processes of a canary which still loads would kill ones that are watched, and the
    whole server would be replaced."""
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    supervisor = start()
    wait_for(supervisor, State.SERVING)
    standin, looks = Standin.made[0], []
    entered, gate = threading.Event(), threading.Event()
    stub_pids = standin.stub_pids

    def slow():
        looks.append(supervisor)
        entered.set()
        assert gate.wait(10)
        return stub_pids()

    standin.stub_pids = slow
    first, second = (threading.Thread(target=supervisor.renew_watch) for _ in range(2))
    first.start()
    assert entered.wait(10)
    second.start()
    supervisor._renew_asked.wait(0.2)  # it must not be asked before the first one's is done
    gate.set()
    first.join(10)
    second.join(10)
    assert not second.is_alive() and len(looks) == 2

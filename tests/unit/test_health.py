"""The watchdog: what is not ready, and since when; a step that hangs is noticed, one that is slow comes back."""

import threading
from types import SimpleNamespace

import pytest

from tritonforge.engines.base import EngineSpec
from tritonforge.engines.simulated import SimulatedEngine
from tritonforge.generate_request import GenerateRequest
from tritonforge.launch.drain import VARIABLE as DRAIN_VARIABLE
from tritonforge.loop import EngineLoop
from tritonforge.observation import health as module
from tritonforge.observation.health import SETTLE_S, STALLED_S, Health, stall_file, tell_supervisor
from tritonforge.observation.step_meter import StepMeter
from tritonforge.scheduling.blocks import BlockManager
from tritonforge.scheduling.scheduler import Scheduler
from tritonforge.scheduling.scheduler_config import SchedulerConfig

SECOND = 10**9


class Clock:
    def __init__(self):
        self.now_ns = 100 * SECOND

    def __call__(self):
        return self.now_ns

    def forward(self, seconds):
        self.now_ns += int(seconds * SECOND)


class Refused(dict):
    def __missing__(self, key):
        return 0


@pytest.fixture
def watched():
    clock, hung = Clock(), []
    scheduler = SimpleNamespace(num_running=1, num_waiting=0, num_refused=Refused(), waiting=SimpleNamespace(usage=0.0))
    loop = SimpleNamespace(meter=StepMeter(clock), scheduler=scheduler, refusal=None, failed=False)
    health = Health(loop, hung.append, stall_timeout_s=30.0, clock_ns=clock)
    return SimpleNamespace(clock=clock, hung=hung, loop=loop, health=health, reasons=lambda: look(health))


def look(health):
    health.look()
    return set(health.reasons)


def test_an_idle_loop_is_ready_however_long_it_idles(watched):
    watched.loop.meter.rest()
    watched.clock.forward(3600)
    assert watched.reasons() == set()


def test_a_slow_step_is_not_ready_until_it_ends(watched):
    watched.loop.meter.begin()
    watched.clock.forward(STALLED_S - 0.1)
    assert watched.reasons() == set()
    watched.clock.forward(0.2)
    assert watched.reasons() == {"stalled"} and "a step has taken 3.1 s" in watched.health.reasons["stalled"]
    watched.loop.meter.begin()
    assert watched.reasons() == set() and not watched.hung


def test_a_step_that_hangs_is_told_to_the_supervisor_once(watched):
    watched.loop.meter.begin()
    for _ in range(4):
        watched.clock.forward(30.0 / 3)
        watched.health.look()
    assert len(watched.hung) == 1 and "1 requests running" in watched.hung[0]


def test_a_full_queue_is_not_ready_until_nobody_was_refused_for_a_while(watched):
    """Wrong: a load balancer would send more to a server that refuses, or flap with every request that ends."""
    watched.loop.scheduler.waiting.usage = 1.0
    assert watched.reasons() == {"queue_full"}
    watched.loop.scheduler.waiting.usage = 0.9
    assert watched.reasons() == set()
    watched.loop.scheduler.num_refused["queue full"] += 1
    assert watched.reasons() == {"queue_full"}
    watched.clock.forward(SETTLE_S)
    assert watched.reasons() == set()


def test_draining_and_failed_are_different_answers(watched):
    watched.loop.refusal = "the server is draining and takes no new requests"
    assert watched.reasons() == {"draining"}
    watched.loop.failed = True
    assert watched.reasons() == {"failed"}


def test_the_log_says_why_and_when_it_is_over(watched, caplog):
    watched.loop.meter.begin()
    watched.clock.forward(5)
    watched.health.look()
    watched.loop.meter.rest()
    watched.clock.forward(2)
    watched.health.look()
    assert [record.message.split(":")[0] for record in caplog.records] == ["not ready", "ready again after 2.0 s"]


def test_an_engine_that_hangs_is_noticed_while_its_loop_waits_for_it(monkeypatch, tmp_path):
    """The real loop with an engine whose step does not return: not ready, and the supervisor's file says why."""
    monkeypatch.setattr(module, "STALLED_S", 0.05)
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setenv(DRAIN_VARIABLE, str(tmp_path / "drain"))
    entered, release, told = threading.Event(), threading.Event(), threading.Event()

    class Hanging(SimulatedEngine):
        def step(self, sequences):
            entered.set()
            release.wait(30)
            return super().step(sequences)

    def tell(cause):
        tell_supervisor(cause)
        told.set()

    engine = Hanging(EngineSpec(vocab_size=50, max_model_len=64, num_blocks=8, block_size=16))
    scheduler = Scheduler(SchedulerConfig(4, 16, 8, 1000), BlockManager(8, 16))
    loop = EngineLoop(engine, scheduler, lambda ids: "x" * len(ids))
    health, ended = Health(loop, tell, stall_timeout_s=0.1), threading.Event()
    loop.start()
    health.start()
    loop.submit(GenerateRequest((1, 2, 3), 2), lambda generation, delta: ended.set() if delta.final else None)
    assert entered.wait(10) and told.wait(10)
    assert "stalled" in health.reasons
    assert "a step has taken" in stall_file(tmp_path / "drain").read_text(encoding="utf-8")
    release.set()
    assert ended.wait(10), "a step that comes back after all is answered"
    health.stop()
    loop.drain(10)
    health.look()
    assert set(health.reasons) == {"draining"}


def test_a_hang_that_cannot_be_told_yet_is_told_again(watched):
    """Wrong: with a full disk a hung engine would never be replaced, and its metrics would go on saying ready."""
    failing = [OSError("no space left on device")]

    def tell(cause):
        if failing:
            raise failing.pop()
        watched.hung.append(cause)

    watched.health._on_hung = tell
    watched.loop.meter.begin()
    watched.clock.forward(31)
    assert watched.reasons() == {"stalled"} and not watched.hung
    assert watched.reasons() == {"stalled"} and len(watched.hung) == 1
    watched.reasons()
    assert len(watched.hung) == 1

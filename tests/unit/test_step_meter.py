"""What a step took and held, and how long the loop has been at it: watchdog and metrics believe these numbers."""

from types import SimpleNamespace

import pytest

from tritonforge.observation.step_meter import StepMeter
from tritonforge.timeline import Timeline

MS = 1_000_000


class Clock:
    now_ns = 0

    def __call__(self):
        return self.now_ns


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def meter(clock):
    return StepMeter(clock)


def step(meter, clock, *, before_ms=1, engine_ms=8, after_ms=1, sampled=True):
    meter.begin()
    clock.now_ns += before_ms * MS
    with meter.computing():
        clock.now_ns += engine_ms * MS
    clock.now_ns += after_ms * MS
    meter.end(SimpleNamespace(work=(None, None), num_tokens=34), sampled=sampled)


def test_a_step_is_counted_with_its_time_size_and_share_outside_the_engine(meter, clock):
    step(meter, clock)
    assert meter.step_seconds.sum == pytest.approx(0.010) and sum(meter.step_seconds.counts) == 1
    assert meter.outside_engine.sum == pytest.approx(0.2)
    assert (meter.step_requests.sum, meter.step_tokens.sum) == (2, 34)
    step(meter, clock, before_ms=0, engine_ms=10, after_ms=0)
    assert meter.outside_engine.sum == pytest.approx(0.2), "the engine's time of the step before counts no more"


def test_only_a_step_that_brought_a_token_is_a_sign_of_generation(meter, clock):
    step(meter, clock, sampled=False)
    assert meter.last_token_ns is None
    step(meter, clock)
    assert meter.last_token_ns == clock.now_ns


def test_the_age_of_the_present_work_starts_anew_with_each_step_and_message(meter, clock):
    with meter.resting():
        assert meter.busy_since_ns is None
        clock.now_ns += 5 * MS
    assert meter.busy_since_ns == 5 * MS
    step(meter, clock)
    assert meter.busy_since_ns == 5 * MS, "what follows a step belongs to it until the next begins"
    step(meter, clock)
    assert meter.busy_since_ns == 15 * MS
    meter.rest()
    assert meter.busy_since_ns is None


def test_gaps_between_tokens_are_those_between_steps_of_a_request(meter):
    """Two answers of one request that sample in the same step make one gap, and the first token makes none."""
    timeline = Timeline(0)
    gaps = [timeline.sampled(now * MS) for now in (10, 10, 30, 30, 60)]
    assert gaps == [None, None, 20 * MS, None, 30 * MS]
    assert timeline.decode_steps == 2 and timeline.first_token_ns == 10 * MS and timeline.last_token_ns == 60 * MS
    for gap in gaps:
        meter.token(gap)
    assert sum(meter.inter_token.counts) == 2 and meter.inter_token.sum == pytest.approx(0.05)

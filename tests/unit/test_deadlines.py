"""Limits of time: who missed which one, and when it makes sense to come back."""

from tritonforge.answer import Answer
from tritonforge.deadlines import Deadlines, RetryAfter
from tritonforge.errors import DeadlineExceeded, Overloaded
from tritonforge.generate_request import GenerateRequest
from tritonforge.generation import Generation
from tritonforge.scheduling.request import FinishReason, Request

MS = 1_000_000
SECOND = 1000 * MS


def generation(key, **limits):
    asked = GenerateRequest((1, 2), 4, **limits)
    answer = Answer(asked, Request(key, asked.prompt_ids, 4), 0, lambda ids: "", None)
    return Generation(asked, [answer], lambda generation, delta: None, 0)


def watched(*generations):
    deadlines = Deadlines()
    for one in generations:
        deadlines.watch(one)
    return deadlines


def test_a_request_that_waits_too_long_is_shed_and_told_its_limit():
    deadlines = watched(waiting := generation(1, queue_timeout_ms=50), generation(2))
    assert deadlines.missed(49 * MS) == []
    [(missed, error)] = deadlines.missed(51 * MS)
    assert missed is waiting and isinstance(error, Overloaded)
    assert "queue_timeout_ms 50" in str(error) and "waited 51 ms" in str(error)
    assert deadlines.missed(SECOND) == [], "a missed limit was told twice"


def test_a_request_that_has_started_may_take_longer_than_its_queue_limit_but_not_than_its_own():
    started = generation(1, queue_timeout_ms=50, timeout_ms=200)
    started.timeline.scheduled_ns = 10 * MS
    deadlines = watched(started)
    assert deadlines.missed(100 * MS) == []
    [(_, error)] = deadlines.missed(200 * MS)
    assert isinstance(error, DeadlineExceeded) and "timeout_ms 200" in str(error)


def test_an_ended_request_misses_nothing():
    ended = generation(1, queue_timeout_ms=50, timeout_ms=100)
    ended.answers[0].finish_reason = FinishReason.STOP
    assert watched(ended).missed(SECOND) == []


def test_the_hint_when_to_retry_follows_the_rate_at_which_requests_end():
    retry = RetryAfter()
    assert retry.seconds(100, 0) == 1, "nothing is known yet"
    for second in range(10):
        retry.ended(second * SECOND)
        retry.ended(second * SECOND)
    assert retry.seconds(20, 10 * SECOND) == 10, "two a second end, twenty wait"
    assert retry.seconds(10_000, 10 * SECOND) == 60
    assert retry.seconds(20, 1000 * SECOND) == 1, "ends of long ago say nothing"

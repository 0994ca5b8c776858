"""The way out of the decoder: exactly one end for every stream, also when sending fails or comes after the stop."""

import threading

import pytest

from tritonforge.contract import STATISTICS
from tritonforge.emitter import Emitter
from tritonforge.errors import InvalidRequest
from tritonforge.generate_request import GenerateRequest
from tritonforge.generation import Delta
from tritonforge.observation.recorder import Recorder
from tritonforge.sampling.sampling import Drawn
from tritonforge.scheduling.request import FinishReason
from tritonforge.streams import ResponseStream
from tritonforge.timeline import Timeline

WAIT_S = 10.0


class FakeSender:
    """Records what is sent; the calls named in `broken` raise."""

    request_id = "r-1"

    def __init__(self, *broken):
        self.broken = broken
        self.calls = []
        self.ended = threading.Event()

    def _call(self, name, value=None):
        if name in self.broken:
            raise RuntimeError(f"{name} is broken")
        self.calls.append((name, value))
        if name != "send":
            self.ended.set()

    def send(self, tensors, *, final):
        self._call("finish" if final else "send", tensors["token_ids"].tolist())

    def fail(self, error):
        self._call("fail", str(error))

    def end(self):
        self._call("end")

    def is_cancelled(self):
        return False


class FakeGeneration:
    def __init__(self, *, stream):
        self.asked = GenerateRequest((1,), 4, stream=stream)
        self.timeline = Timeline(0, scheduled_ns=1)

    def statistics(self, now_ns):
        return {tensor.name: 0 for tensor in STATISTICS}


@pytest.fixture
def emitter():
    emitter = Emitter()
    yield emitter
    emitter.stop()


def run(emitter, sender, *, stream=True):
    cancelled = []
    way_out = ResponseStream(sender, emitter, cancelled.append, lambda: False)
    way_out.key = 5
    generation = FakeGeneration(stream=stream)
    for token_id in range(3):
        way_out.take(generation, Delta("x", (Drawn(token_id),)))
    way_out.take(generation, Delta("", (), FinishReason.LENGTH, final=True))
    assert sender.ended.wait(WAIT_S) or "end" in sender.broken
    emitter.stop()
    assert way_out.closed
    return [name for name, _ in sender.calls], cancelled


def test_a_streamed_answer_is_sent_and_finished_once(emitter):
    sender = FakeSender()
    calls, cancelled = run(emitter, sender)
    assert calls[-1] == "finish" and calls.count("finish") == 1 and not cancelled


def test_a_whole_answer_is_one_response(emitter):
    calls, _ = run(emitter, FakeSender(), stream=False)
    assert calls == ["finish"]


def test_a_response_that_cannot_be_sent_ends_the_request_instead_of_leaving_a_hole(emitter):
    sender = FakeSender("send")
    recorder = Recorder()
    way_out = ResponseStream(sender, emitter, (cancelled := []).append, lambda: False, recorder)
    way_out.key = 5
    way_out.take(generation := FakeGeneration(stream=True), Delta("x", (Drawn(0),)))
    assert sender.ended.wait(WAIT_S)
    way_out.take(generation, Delta("y", (Drawn(1),), FinishReason.LENGTH, final=True))
    emitter.stop()
    assert [name for name, _ in sender.calls] == ["fail"]
    assert cancelled == [5]
    (record,) = recorder.take()
    assert (record.request_id, record.outcome, record.code) == ("r-1", "error", "INTERNAL"), "ended once, and not well"


@pytest.mark.parametrize(("broken", "last"), [(("finish",), "fail"), (("finish", "fail"), "end")])
def test_a_last_response_that_cannot_be_sent_still_ends_the_stream(emitter, broken, last):
    calls, _ = run(emitter, FakeSender(*broken), stream=False)
    assert calls == [last]


def test_a_request_that_breaks_a_rule_is_taken_down_with_its_id_and_code(emitter):
    """Wrong: operators would not see that a client sends what is refused."""
    recorder = Recorder()
    way_out = ResponseStream(FakeSender(), emitter, lambda key: None, lambda: False, recorder)
    way_out.fail(InvalidRequest("top_k must be an integer"))
    way_out.fail(InvalidRequest("top_k must be an integer"))
    (record,) = recorder.take()
    assert (record.request_id, record.code, record.asked) == ("r-1", "INVALID_ARGUMENT", None)
    assert recorder.rejected["invalid"] == 1


@pytest.mark.parametrize("keeps_text", [False, True])
def test_texts_are_kept_for_the_log_only_when_it_wants_them(emitter, keeps_text):
    recorder, sender = Recorder(), FakeSender()
    recorder.keeps_text = keeps_text
    way_out = ResponseStream(sender, emitter, lambda key: None, lambda: False, recorder)
    generation = FakeGeneration(stream=False)
    way_out.take(generation, Delta("Par", (Drawn(0),)))
    way_out.take(generation, Delta("is", (Drawn(1),), FinishReason.LENGTH, final=True))
    assert sender.ended.wait(WAIT_S)
    (record,) = recorder.take()
    assert record.text == ("Paris" if keeps_text else "") and record.outcome == "length"


def test_what_is_posted_after_the_stop_runs_at_once(emitter):
    emitter.stop()
    ran = []
    emitter.post(lambda: ran.append(True))
    assert ran == [True]

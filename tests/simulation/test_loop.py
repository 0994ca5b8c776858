"""The engine loop's promise: every request is answered in order and gets exactly one final delta, whatever happens."""

import random
import threading
from collections import defaultdict

import numpy as np
import pytest

from tritonforge.engines.base import EngineSpec, SequenceStep
from tritonforge.engines.simulated import SimulatedEngine
from tritonforge.errors import EngineFailure, InvalidRequest, Overloaded
from tritonforge.generate_request import GenerateRequest, SamplingParams
from tritonforge.loop import EngineLoop
from tritonforge.scheduling.blocks import BlockManager
from tritonforge.scheduling.request import FinishReason
from tritonforge.scheduling.scheduler import Scheduler, SchedulerConfig

WAIT_S = 20.0
NUM_BLOCKS = 24
BLOCK_SIZE = 4


def decode(token_ids):
    """One letter a token: token 0 is a, token 1 is b, ..."""
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)


class Answers:
    """Collects deltas per request and lets a test wait for the end of each."""

    def __init__(self):
        self.deltas = defaultdict(list)
        self.finals = threading.Semaphore(0)

    def sink(self, name):
        def take(generation, delta):
            self.deltas[name].append(delta)
            if delta.final:
                self.finals.release()

        return take

    def wait(self, count):
        for _ in range(count):
            assert self.finals.acquire(timeout=WAIT_S), "a request got no final answer"

    def token_ids(self, name):
        return [token_id for delta in self.deltas[name] for token_id in delta.token_ids]

    def text(self, name):
        return "".join(delta.text for delta in self.deltas[name])

    def final(self, name):
        assert [delta.final for delta in self.deltas[name]].count(True) == 1, "more than one final answer"
        assert self.deltas[name][-1].final, "something was sent after the final answer"
        return self.deltas[name][-1]


class GatedEngine(SimulatedEngine):
    """A simulated engine whose steps wait for `gate`, and fail as `failure` says."""

    def __init__(self, spec):
        super().__init__(spec)
        self.gate = threading.Event()
        self.gate.set()
        self.stepping = threading.Event()
        self.failure = None
        self.closed = False

    def step(self, sequences):
        self.stepping.set()
        assert self.gate.wait(WAIT_S)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return super().step(sequences)

    def close(self):
        self.closed = True


@pytest.fixture
def engine():
    return GatedEngine(EngineSpec(26, 64, BLOCK_SIZE, NUM_BLOCKS))


@pytest.fixture
def loop(engine):
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_waiting=8, max_waiting_tokens=1024)
    loop = EngineLoop(engine, Scheduler(config, BlockManager(NUM_BLOCKS, BLOCK_SIZE)), decode)
    loop.start()
    yield loop
    engine.gate.set()
    loop.drain(0)


@pytest.fixture
def answers():
    return Answers()


def ask(prompt=(1, 2, 3), max_tokens=8, **options):
    return GenerateRequest(tuple(prompt), max_tokens, **options)


def test_random_cancels_lose_no_answer_and_leak_no_block(loop, answers):
    rng = random.Random(7)
    keys = []
    for name in range(200):
        prompt = [rng.randrange(26) for _ in range(rng.randrange(1, 30))]
        if name >= 8:  # at most 8 are unfinished, so none is refused
            loop.cancel(rng.choice(keys))
            answers.wait(1)
        keys.append(loop.submit(ask(prompt, rng.randrange(1, 30)), answers.sink(name)))
        if rng.random() < 0.5:
            loop.cancel(rng.choice(keys))
    answers.wait(8)
    for name in range(200):
        assert answers.final(name).finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
    assert loop.drain(WAIT_S)
    assert loop.scheduler.blocks.num_free == NUM_BLOCKS


def test_tokens_and_text_are_those_of_a_lone_request(loop, answers):
    for name in range(8):
        loop.submit(ask(range(name + 1), 20), answers.sink(name))
    answers.wait(8)
    for name in range(8):
        loop.submit(ask(range(name + 1), 20), answers.sink(f"alone-{name}"))
        answers.wait(1)
        assert answers.token_ids(name) == answers.token_ids(f"alone-{name}")
        assert answers.text(name) == decode(answers.token_ids(name))


def test_a_seed_fixes_the_answer_and_another_seed_changes_it(loop, answers):
    for name, seed in (("first", 5), ("again", 5), ("other", 6)):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        loop.submit(ask(max_tokens=30, sampling=sampling), answers.sink(name))
    answers.wait(3)
    assert answers.token_ids("first") == answers.token_ids("again") != answers.token_ids("other")


def test_a_stop_string_ends_the_answer_before_it_and_frees_the_blocks(loop, answers):
    loop.submit(ask(max_tokens=12), answers.sink("whole"))
    answers.wait(1)
    whole = answers.text("whole")
    loop.submit(ask(max_tokens=12, stop=(whole[5:7],)), answers.sink("stopped"))
    answers.wait(1)
    assert answers.text("stopped") == whole[: whole.index(whole[5:7])]
    assert answers.final("stopped").finish_reason is FinishReason.STOP
    assert loop.scheduler.blocks.num_free == NUM_BLOCKS


def test_cancel_by_request_id_reaches_waiting_and_running_requests(loop, engine, answers):
    engine.gate.clear()
    for name in range(6):  # 4 run, 2 wait
        loop.submit(ask(max_tokens=30, request_id="mine" if name % 2 else "other"), answers.sink(name))
    assert engine.stepping.wait(WAIT_S)
    found = loop.cancel_request_id("mine")
    missed = loop.cancel_request_id("nobody's")
    engine.gate.set()
    assert found.result(WAIT_S) == 3
    assert missed.result(WAIT_S) == 0
    answers.wait(6)
    for name in range(6):
        expected = FinishReason.CANCELLED if name % 2 else FinishReason.LENGTH
        assert answers.final(name).finish_reason is expected


def test_a_full_queue_refuses_by_name_and_serves_the_rest(loop, engine, answers):
    engine.gate.clear()
    loop.submit(ask(max_tokens=2), answers.sink("first"))
    assert engine.stepping.wait(WAIT_S)
    for name in range(20):
        loop.submit(ask(max_tokens=2), answers.sink(name))
    engine.gate.set()
    answers.wait(21)
    finals = [answers.final(name) for name in range(20)]
    refused = [final for final in finals if final.error is not None]
    assert len(refused) == 20 - (8 + 3), "max_waiting 8 and the 3 free seats bound the queue"
    assert all(isinstance(final.error, Overloaded) and "max_waiting" in str(final.error) for final in refused)


def test_what_can_never_fit_is_refused_with_its_size(loop, answers):
    loop.submit(ask(max_tokens=NUM_BLOCKS * BLOCK_SIZE), answers.sink("huge"))
    answers.wait(1)
    assert isinstance(answers.final("huge").error, InvalidRequest)
    assert "99 tokens" in str(answers.final("huge").error)


def test_a_failed_step_fails_its_requests_only(loop, engine, answers):
    engine.gate.clear()
    engine.failure = EngineFailure("no memory for the step")
    loop.submit(ask(), answers.sink("in the step"))
    assert engine.stepping.wait(WAIT_S)
    loop.submit(ask(), answers.sink("after it"))
    engine.gate.set()
    answers.wait(2)
    assert "no memory for the step" in str(answers.final("in the step").error)
    assert answers.final("after it").finish_reason is FinishReason.LENGTH
    assert loop.scheduler.blocks.num_free == NUM_BLOCKS


def test_logits_that_are_no_numbers_fail_their_request_only(loop, engine, answers):
    engine.gate.clear()
    loop.submit(ask(max_tokens=1), answers.sink("first"))
    assert engine.stepping.wait(WAIT_S)
    for name in ("poisoned", "neighbour"):
        loop.submit(ask(max_tokens=4), answers.sink(name))
    healthy = engine.step

    def step(sequences):
        logits = healthy(sequences)
        if len(sequences) == 2:
            logits[0] = np.nan
            engine.step = healthy
        return logits

    engine.step = step
    engine.gate.set()
    answers.wait(3)
    assert "no numbers" in str(answers.final("poisoned").error)
    assert answers.final("neighbour").finish_reason is FinishReason.LENGTH
    assert loop.scheduler.blocks.num_free == NUM_BLOCKS


def test_a_dead_loop_answers_all_and_refuses_new_work(engine, answers):
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_waiting=8, max_waiting_tokens=1024)
    died = threading.Event()
    scheduler = Scheduler(config, BlockManager(NUM_BLOCKS, BLOCK_SIZE))
    loop = EngineLoop(engine, scheduler, decode, on_death=died.set)
    loop.start()
    engine.gate.clear()
    engine.failure = ZeroDivisionError("a bug")
    for name in range(5):
        loop.submit(ask(), answers.sink(name))
    engine.gate.set()
    answers.wait(5)
    assert died.wait(WAIT_S)
    for name in range(5):
        assert "ZeroDivisionError: a bug" in str(answers.final(name).error)
    with pytest.raises(Overloaded, match="the engine loop died"):
        loop.submit(ask(), answers.sink("late"))


def test_drain_lets_running_requests_end_and_refuses_new_ones(loop, engine, answers):
    engine.gate.clear()
    loop.submit(ask(max_tokens=5), answers.sink("running"))
    assert engine.stepping.wait(WAIT_S)
    drained = []
    drain = threading.Thread(target=lambda: drained.append(loop.drain(WAIT_S)))
    drain.start()
    while True:  # drain() refuses from its first statement on; until then a request may still slip in
        try:
            loop.submit(ask(max_tokens=1), lambda generation, delta: None)
        except Overloaded as error:
            assert "draining" in str(error)
            break
    engine.gate.set()
    drain.join(WAIT_S)
    assert drained == [True]
    assert answers.final("running").finish_reason is FinishReason.LENGTH
    assert engine.closed


def test_drain_cancels_what_outlasts_its_time(loop, engine, answers):
    engine.gate.clear()
    loop.submit(ask(max_tokens=5), answers.sink("stuck"))
    assert engine.stepping.wait(WAIT_S)
    threading.Timer(0.2, engine.gate.set).start()
    assert not loop.drain(0.01)
    assert answers.final("stuck").finish_reason is FinishReason.CANCELLED


def test_a_second_drain_does_not_wait_for_what_the_first_one_cancelled(loop, engine, answers):
    """Wrong: a decoder whose drain had to cancel something waits its whole time once more when it is unloaded."""
    engine.gate.clear()
    loop.submit(ask(max_tokens=5), answers.sink("stuck"))
    assert engine.stepping.wait(WAIT_S)
    threading.Timer(0.2, engine.gate.set).start()
    assert not loop.drain(0.01)
    again = threading.Thread(target=loop.drain, args=(10 * WAIT_S,), daemon=True)
    again.start()
    again.join(WAIT_S)
    assert not again.is_alive()


def test_statistics_add_up(loop, answers):
    taken = []

    def sink(generation, delta):
        if delta.final:
            taken.append(generation.statistics(generation.timeline.last_token_ns))
        answers.sink("one")(generation, delta)

    loop.submit(ask(max_tokens=6), sink)
    answers.wait(1)
    [statistics] = taken
    assert (statistics["prompt_tokens"], statistics["completion_tokens"], statistics["decode_steps"]) == (3, 6, 5)
    assert statistics["queue_us"] >= 0 and statistics["prefill_us"] > 0 and statistics["decode_us"] > 0


def test_logits_of_prefill_chunks_are_not_sampled(loop, answers):
    """A prompt of 40 tokens takes three chunks of at most 16; its answer is that of a prompt computed at once."""
    prompt = [i % 26 for i in range(40)]
    loop.submit(ask(prompt, 4), answers.sink("chunked"))
    answers.wait(1)
    engine = SimulatedEngine(EngineSpec(26, 64, 64, 1))
    expected = []
    for _ in range(4):
        logits = engine.step([SequenceStep(prompt + expected, 0, [0])])
        expected.append(int(np.argmax(logits[0])))
    assert answers.token_ids("chunked") == expected

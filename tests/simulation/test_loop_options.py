"""What a request may ask of the engine loop beyond one greedy answer, on the simulated engine."""

import threading
from collections import defaultdict

import numpy as np
import pytest

from tritonforge.engines.base import EngineSpec
from tritonforge.engines.simulated import SimulatedEngine, logits_of
from tritonforge.errors import DeadlineExceeded, Overloaded
from tritonforge.generate_request import GenerateRequest, SamplingParams
from tritonforge.loop import PROMPT_LOGPROBS_CHUNK, EngineLoop
from tritonforge.scheduling.blocks import BlockManager
from tritonforge.scheduling.request import FinishReason
from tritonforge.scheduling.scheduler import Scheduler
from tritonforge.scheduling.scheduler_config import SchedulerConfig
from tritonforge.scheduling.speculation import Speculation, StepCost

WAIT_S = 20.0
VOCAB, BLOCK_SIZE, NUM_BLOCKS = 26, 4, 256
STOP_TOKEN = 7


def decode(token_ids):
    """One letter a token."""
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)


class Gate:
    """Steps of the engine wait for it while it is closed; `stepping` says that one has arrived."""

    def __init__(self):
        self.open = threading.Event()
        self.open.set()
        self.stepping = threading.Event()


class GatedEngine(SimulatedEngine):
    def __init__(self, spec, gate):
        super().__init__(spec)
        self.gate = gate

    def step(self, sequences):
        self.gate.stepping.set()
        assert self.gate.open.wait(WAIT_S)
        return super().step(sequences)


class Clock:
    """Nanoseconds: one passes with each look at it, more when a test says so."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return self.now


class Asked:
    """One submitted request: its deltas, and the statistics of its end."""

    def __init__(self, loop, prompt, max_tokens, **options):
        self.deltas = []
        self.statistics = None
        self._ended = threading.Event()
        loop.submit(GenerateRequest(tuple(prompt), max_tokens, **options), self._take)

    def _take(self, generation, delta):
        self.deltas.append(delta)
        if delta.final:
            self.statistics = generation.statistics(0)
            self._ended.set()

    def wait(self):
        assert self._ended.wait(WAIT_S), "no final answer"
        assert [delta.final for delta in self.deltas].count(True) == 1 and self.deltas[-1].final
        return self

    @property
    def answers(self):
        """Token ids by answer."""
        found = defaultdict(list)
        for delta in self.deltas:
            found[delta.index] += delta.token_ids
        return dict(found)

    @property
    def text(self):
        return "".join(delta.text for delta in self.deltas)

    @property
    def error(self):
        return self.deltas[-1].error


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def loop(gate, clock):
    engine = GatedEngine(EngineSpec(VOCAB, 400, BLOCK_SIZE, NUM_BLOCKS), gate)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=100, max_waiting=4, max_waiting_tokens=4096)
    free = StepCost(fixed=1.0, per_sequence=0.0, per_draft=0.0, per_draft_token=0.0, per_change=0.0)
    speculation = Speculation(lambda: 1, free)
    scheduler = Scheduler(config, BlockManager(NUM_BLOCKS, BLOCK_SIZE), speculation.propose)
    loop = EngineLoop(engine, scheduler, decode, frozenset({STOP_TOKEN}), forget=speculation.forget, clock_ns=clock)
    loop.speculation = speculation
    loop.start()
    yield loop
    gate.open.set()
    loop.drain(0)
    assert scheduler.blocks.num_free == NUM_BLOCKS, "a block leaked"
    assert len(speculation) == 0, "a lookup leaked"


def drawn_like(seed):
    return SamplingParams(temperature=1.0, seed=seed)


def test_n_answers_share_the_prompt_and_each_is_that_of_its_own_seed(loop):
    prompt = [i % VOCAB for i in range(21)]
    several = Asked(loop, prompt, 12, n=3, sampling=drawn_like(5), ignore_eos=True).wait()
    again = Asked(loop, prompt, 12, n=3, sampling=drawn_like(5), ignore_eos=True, cache_salt="x").wait()
    alone = Asked(loop, prompt, 12, sampling=drawn_like(5), ignore_eos=True).wait()
    assert sorted(several.answers) == [0, 1, 2]
    assert several.answers == again.answers, "a seed fixes all answers"
    assert several.answers[0] == alone.answers[0]
    assert len({tuple(ids) for ids in several.answers.values()}) == 3, "samples repeat each other"
    assert several.statistics["completion_tokens"] == 36
    ends = [delta for delta in several.deltas if delta.finish_reason]
    assert sorted(delta.index for delta in ends) == [0, 1, 2]


def test_cancelling_n_answers_ends_all_of_them_before_and_after_the_fork(loop, gate):
    for tokens_before in (0, 1):
        gate.open.clear()
        gate.stepping.clear()
        found = []
        several = GenerateRequest((1, 2, 3), 200, n=4, ignore_eos=True, request_id="several")
        ended, told = threading.Event(), threading.Event()

        def sink(generation, delta, found=found, ended=ended, told=told):
            found.append(delta)
            told.set()
            if delta.final:
                ended.set()

        loop.submit(several, sink)
        assert gate.stepping.wait(WAIT_S)
        if tokens_before:
            gate.open.set()
            assert told.wait(WAIT_S)
        cancelled = loop.cancel_request_id("several")
        gate.open.set()
        assert cancelled.result(WAIT_S) == 1
        assert ended.wait(WAIT_S)
        reasons = [(delta.index, delta.finish_reason) for delta in found if delta.finish_reason]
        assert sorted(reasons) == [(index, FinishReason.CANCELLED) for index in range(4)]


def test_echo_puts_the_prompt_before_each_answer(loop):
    asked = Asked(loop, [0, 1, 2], 4, echo=True, n=2, ignore_eos=True).wait()
    firsts = {delta.index: delta for delta in reversed(asked.deltas)}
    assert all(delta.prompt.text == "abc" and delta.prompt.token_ids == (0, 1, 2) for delta in firsts.values())
    assert sum(delta.prompt is not None for delta in asked.deltas) == 2


def test_prompt_logprobs_are_those_of_each_prompt_token_after_the_ones_before_it(loop):
    prompt = [i * 7 % VOCAB for i in range(2 * PROMPT_LOGPROBS_CHUNK + 3)]
    Asked(loop, prompt, 1, ignore_eos=True).wait()  # its blocks are cached, and must not be used
    asked = Asked(loop, prompt, 2, prompt_logprobs=2, ignore_eos=True).wait()
    told = asked.deltas[0].prompt.logprobs
    assert len(told) == len(prompt) - 1
    for position in (0, 1, PROMPT_LOGPROBS_CHUNK - 1, PROMPT_LOGPROBS_CHUNK, len(prompt) - 2):
        logits = logits_of([prompt[: position + 1]], VOCAB)[0].astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert told[position].token_id == prompt[position + 1]
        assert told[position].logprob == pytest.approx(expected[prompt[position + 1]], abs=1e-4)
        assert [token_id for token_id, _ in told[position].top] == np.argsort(-expected)[:2].tolist()


def test_min_tokens_hold_off_end_tokens_and_stop_strings(loop):
    for seed in range(20):
        asked = Asked(loop, [seed], 40, sampling=SamplingParams(temperature=1.0, seed=seed, min_tokens=30)).wait()
        assert len(asked.answers[0]) >= 30 and STOP_TOKEN not in asked.answers[0][:29]
    whole = Asked(loop, [3], 40, ignore_eos=True).wait().text
    late = Asked(loop, [3], 40, ignore_eos=True, stop=(whole[4],), sampling=SamplingParams(min_tokens=10)).wait()
    assert late.text.startswith(whole[:9])


def test_a_stop_token_of_the_request_ends_the_answer_and_its_text_is_shown_only_when_asked_for(loop):
    whole = Asked(loop, [3], 40, ignore_eos=True).wait()
    token_id = whole.answers[0][5]
    end = whole.answers[0].index(token_id)
    hidden = Asked(loop, [3], 40, ignore_eos=True, stop_token_ids=(token_id,)).wait()
    shown = Asked(loop, [3], 40, ignore_eos=True, stop_token_ids=(token_id,), include_stop_in_output=True).wait()
    assert hidden.text == whole.text[:end] and shown.text == whole.text[: end + 1]
    assert hidden.deltas[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("stop_at", [None, 9])
def test_drafts_change_neither_tokens_nor_text_nor_counts(loop, stop_at):
    """The simulated engine repeats no text, so repetition is forced: three tokens are all that may be drawn."""
    only = SamplingParams(temperature=1.0, seed=3, logit_bias=tuple((token_id, 60.0) for token_id in (1, 2, 3)))
    plain = Asked(loop, [1, 2, 3] * 5, 60, ignore_eos=True, sampling=only, speculate=False).wait()
    stop = () if stop_at is None else (plain.text[stop_at : stop_at + 3],)
    plain = Asked(loop, [1, 2, 3] * 5, 60, ignore_eos=True, sampling=only, speculate=False, stop=stop).wait()
    drafted = Asked(loop, [1, 2, 3] * 5, 60, ignore_eos=True, sampling=only, stop=stop).wait()
    assert drafted.answers == plain.answers and drafted.text == plain.text
    assert drafted.statistics["completion_tokens"] == plain.statistics["completion_tokens"]
    assert drafted.statistics["draft_tokens"] > drafted.statistics["accepted_tokens"] > 0
    assert drafted.statistics["decode_steps"] < plain.statistics["decode_steps"]
    assert plain.statistics["draft_tokens"] == 0


def test_options_that_leave_no_token_fail_their_request_by_name(loop):
    never = SamplingParams(bad_words=tuple((token_id,) for token_id in range(VOCAB)))
    neighbour = Asked(loop, [1], 20, ignore_eos=True)
    assert "leave no token" in str(Asked(loop, [2], 5, sampling=never).wait().error)
    assert neighbour.wait().deltas[-1].finish_reason is FinishReason.LENGTH


def test_a_request_that_is_not_started_in_time_is_shed_with_a_hint_and_one_that_takes_too_long_ends(loop, gate, clock):
    gate.open.clear()
    running = [Asked(loop, [i], 200, ignore_eos=True, timeout_ms=500) for i in range(8)]
    assert gate.stepping.wait(WAIT_S)
    late = Asked(loop, [9], 1, queue_timeout_ms=100)
    clock.now = 200_000_000
    gate.stepping.clear()
    gate.open.set()
    late.wait()
    assert isinstance(late.error, Overloaded)
    assert "queue_timeout_ms 100" in str(late.error) and "retry in about" in str(late.error)
    clock.now = 600_000_000
    for one in running:
        assert isinstance(one.wait().error, DeadlineExceeded) or one.deltas[-1].finish_reason is FinishReason.LENGTH


def test_a_flood_loses_its_own_newest_request_to_a_tenant_with_less(loop, gate):
    gate.open.clear()
    first = Asked(loop, [0], 2, tenant="flood", ignore_eos=True)
    assert gate.stepping.wait(WAIT_S)
    flood = [Asked(loop, [i], 2, tenant="flood", ignore_eos=True) for i in range(11)]
    other = Asked(loop, [5], 2, tenant="other", ignore_eos=True)
    gate.open.set()
    assert other.wait().error is None
    errors = [one.wait().error for one in (first, *flood)]
    assert [error is None for error in errors] == [True] * 11 + [False]
    assert "pushed out" in str(errors[-1]) and "'flood'" in str(errors[-1]) and "retry in about" in str(errors[-1])

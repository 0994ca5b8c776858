"""In float32, what is served is what transformers says: tokens, logits and log-probabilities, however it was scheduled.

The real checkpoint and small random ones are exported and run by the real engine and the real loop, with a float32 KV
cache. Chunks, preemption, cached prefixes, copied blocks and drafts may then change nothing but the last bits.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import checkout
import checkpoint
import export
import numpy as np
import pytest
import torch
from golden_serving import NUM_BLOCKS, Case, SharedEngine, serve
from recipe import Recipe
from tiny_checkpoint import write_checkpoint
from transformers import GenerationConfig

from tritonforge.answer import sample_params
from tritonforge.engines.base import SequenceStep
from tritonforge.generate_request import GenerateRequest, SamplingParams
from tritonforge.sampling.sampling import Drawn
from tritonforge.scheduling.planner import Propose
from tritonforge.scheduling.request import FinishReason, Request
from tritonforge.scheduling.speculation import StepCost

REAL = "smollm2-135m"
TOLERANCE = {REAL: 5e-4, "llama": 1e-4, "qwen2": 1e-4, "mistral": 1e-4}
"""Most that a logit or log-probability may differ from transformers'. Seen: 1.3e-4 in the real model, whose logits have
a standard deviation of 3.7, and 3e-5 in the small ones, as far as torch's float32 is from float64 there."""
QUANTIZED_TOLERANCE = 0.5
"""The same for a u8 KV cache. Seen: 0.34 in a small model, 0.12 in the real one."""
FREE_DRAFTS = StepCost(per_draft=0.0, per_draft_token=0.0, per_change=0.0)
"""Drafts that always pay: as many as possible are verified, and refused."""


def sharpen(model) -> None:
    """Attention that looks at single tokens, and biases and norms that are not 0 or 1, so that they matter."""
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.add_(0.3 * torch.randn_like(weight))
        elif "q_proj" in name or "k_proj" in name:
            weight.mul_(4.0)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name == REAL else []) for name in TOLERANCE],
)
def case(request, tmp_path_factory) -> Case:
    """A model with its export."""
    if request.param == REAL:
        wanted = Recipe.load(checkout.RECIPES / "smollm2-135m-int8.toml").checkpoint
        located = checkpoint.locate(wanted.source, wanted.sha256)
        folder = export.export(located, checkout.WORK / f"export-{located.digest[:12]}").folder
    else:
        work = tmp_path_factory.mktemp(request.param)
        located = checkpoint.locate(str(write_checkpoint(work / "checkpoint", request.param, sharpen)))
        folder = export.export(located, work / "export").folder
    model = export.load(located)
    model.generation_config = GenerationConfig()
    return Case(model, folder, frozenset(checkpoint.inspect(located).stop_token_ids), TOLERANCE[request.param])


@pytest.fixture(scope="module")
def engine(case: Case) -> SharedEngine:
    """Its engine, with everything in float32."""
    return SharedEngine(case.open_engine())


def prompts_of(case: Case, lengths, seed=7) -> list[tuple[int, ...]]:
    """Random prompts; every other one repeats itself, so that there is something to look up."""
    rng = random.Random(seed)
    vocab_size = case.model.config.vocab_size
    prompts = []
    for index, length in enumerate(lengths):
        period = length if index % 2 else max(1, length // 4)
        prompts.append(tuple([rng.randrange(3, vocab_size) for _ in range(period)] * 5)[:length])
    return prompts


def check_logprobs(case: Case, told: Sequence[Drawn], logprobs: np.ndarray, num_top: int) -> None:
    """`told` against transformers' `logprobs` [len(told), vocab_size], the most likely ones included."""
    assert len(told) == len(logprobs)
    for drawn, row in zip(told, logprobs, strict=True):
        assert drawn.logprob == pytest.approx(row[drawn.token_id], abs=case.tolerance)
        ids, values = zip(*drawn.top, strict=True)
        assert len(set(ids)) == num_top
        assert values == pytest.approx(row[list(ids)], abs=case.tolerance)
        assert values == pytest.approx(-np.sort(-row)[:num_top], abs=case.tolerance)


def check_answer(case: Case, asked: GenerateRequest, drawn: Sequence[Drawn], tolerance=None) -> None:
    """The log-probability of each token of an answer, however it was drawn, against transformers' of the whole text."""
    token_ids = [one.token_id for one in drawn]
    logprobs = case.logprobs([*asked.prompt_ids, *token_ids[:-1]])[len(asked.prompt_ids) - 1 :]
    expected = logprobs[np.arange(len(token_ids)), token_ids]
    assert [one.logprob for one in drawn] == pytest.approx(expected, abs=tolerance or case.tolerance)


def test_logits_of_every_position_are_those_of_transformers(case, engine):
    """Three sequences, their blocks out of order, in steps of mixed chunks that begin and end inside blocks."""
    rng = random.Random(1)
    lengths = (200, 77, 33)
    prompts = prompts_of(case, lengths)
    blocks = rng.sample(range(NUM_BLOCKS), 32)
    tables = [blocks[start : start + 8] for start in (0, 8, 16)]
    past, rows = [0, 0, 0], [[], [], []]
    while any(position < length for position, length in zip(past, lengths, strict=True)):
        chunks = [min(rng.choice((0, 1, 2, 31, 33, 80)), length - p) for p, length in zip(past, lengths, strict=True)]
        chosen = [index for index in (2, 0, 1) if chunks[index]]
        logits = (
            engine.step(
                [SequenceStep(prompts[i][past[i] : past[i] + chunks[i]], past[i], tables[i], chunks[i]) for i in chosen]
            )
            if chosen
            else np.empty((0, 1))
        )
        for index, part in zip(
            chosen, np.split(logits.copy(), np.cumsum([chunks[i] for i in chosen])[:-1]), strict=True
        ):
            rows[index].append(part)
            past[index] += chunks[index]
    for prompt, parts in zip(prompts, rows, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), case.logits(prompt), rtol=0, atol=case.tolerance)


SCHEDULES = {
    "all at once": {},
    "in chunks": {"budget": 9},
    "one after the other": {"one_by_one": True},
    "with preemption": {"num_blocks": 9},
    "with looked-up drafts": {"cost": FREE_DRAFTS},
    "with half-right drafts": {"propose": True},
    "with all of it": {"budget": 24, "num_blocks": 9, "propose": True},
}


def half_right(asked: Sequence[GenerateRequest], expected: Sequence[list[int]]) -> Propose:
    """Drafts of 1 to 7 tokens of the right answer, many of them with a wrong one at the end."""
    answers = {request.prompt_ids: answer for request, answer in zip(asked, expected, strict=True)}

    def propose(request: Request, most: int) -> list[int]:
        start = len(request.output_ids)
        draft = answers[request.prompt_ids][start : start + min(most, 1 + start % 7)]
        return draft if start % 2 else [*draft[:-1], 3]

    return propose


@pytest.fixture(scope="module")
def greedy(case) -> tuple[list[GenerateRequest], list[list[int]]]:
    """Requests, each with transformers' greedy answer. The prompts begin alike; some are one token round a block's end.

    No choice is a near tie: within the tolerance, another one would be as right.
    """
    asked, expected = [], []
    shared = prompts_of(case, (64,))[0]
    for length in (1, 31, 32, 63, 65, 150):
        prompt = (shared + prompts_of(case, (0, 100))[1])[:length]
        asked.append(GenerateRequest(prompt, 40))
        expected.append(case.generate(prompt, 40))
        rows = np.sort(case.logits([*prompt, *expected[-1]])[length - 1 : -1], axis=-1)
        assert (rows[:, -1] - rows[:, -2]).min() > 2 * case.tolerance, (
            f"choose another prompt than that of {length} tokens"
        )
    return asked, expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_greedy_tokens_are_those_of_transformers_generate(case, engine, greedy, schedule):
    asked, expected = greedy
    options = SCHEDULES[schedule]
    propose = half_right(asked, expected) if "propose" in options else None
    answers, scheduler = serve(case, engine, asked, **(options | {"propose": propose}))
    assert [answer.token_ids() for answer in answers] == expected
    ends = [FinishReason.STOP if ids[-1] in case.stop_token_ids else FinishReason.LENGTH for ids in expected]
    assert [answer.reasons[0] for answer in answers] == ends
    assert (scheduler.num_preemptions > 0) == ("num_blocks" in options), "else this proves nothing"
    assert scheduler.num_draft_tokens > 0 or "cost" not in options, "else this proves nothing"
    assert scheduler.num_draft_tokens > scheduler.num_accepted_tokens > 0 or propose is None, "else this proves nothing"
    assert scheduler.num_prefix_hits > 0 or "one_by_one" not in options, "else this proves nothing"


def test_log_probabilities_are_log_softmax_of_transformers_logits(case, engine):
    """Of prompts in chunks, while others decode, and of requests that are preempted and computed again."""
    sampling = SamplingParams(logprobs=5)
    asked = [
        GenerateRequest(prompt, 40, sampling, prompt_logprobs=3) for prompt in prompts_of(case, (2, 40, 64, 97, 150))
    ]
    answers, scheduler = serve(case, engine, asked, budget=48, num_blocks=6, cost=FREE_DRAFTS)
    assert scheduler.num_preemptions > 0, "else this proves nothing"
    for request, answer in zip(asked, answers, strict=True):
        length = len(request.prompt_ids)
        logprobs = case.logprobs([*request.prompt_ids, *answer.token_ids()])
        check_logprobs(case, answer.drawn[0], logprobs[length - 1 : -1], 5)
        assert [one.token_id for one in answer.prompt_logprobs] == list(request.prompt_ids[1:])
        check_logprobs(case, answer.prompt_logprobs, logprobs[: length - 1], 3)


@pytest.mark.parametrize("num_blocks", [pytest.param(NUM_BLOCKS, marks=pytest.mark.slow), 10])
def test_samples_that_share_a_prompt_by_copy_on_write_are_those_that_do_not(case, engine, num_blocks):
    """Three different answers to a prompt that ends inside a block: each must read its own tokens and no others.

    Drawn from 20 tokens: among 49,152, each of which may have a share of 3e-5, the last bits of logits decide now and
    then between two neighbours.
    """
    sampling = SamplingParams(temperature=1.5, top_k=20, seed=11, logprobs=0)
    prompts = prompts_of(case, (31, 33, 75, 96))
    asked = [GenerateRequest(prompt, 40, sampling, n=3) for prompt in prompts]
    before = engine.num_copies
    answers, scheduler = serve(case, engine, asked, num_blocks=num_blocks, cost=FREE_DRAFTS)
    assert engine.num_copies > before, "else this proves nothing"
    assert (scheduler.num_preemptions > 0) == (num_blocks < NUM_BLOCKS), "else this proves nothing"
    for request, answer in zip(asked, answers, strict=True):
        alone = [replace(request, n=1, sampling=sample_params(sampling, index)) for index in range(3)]
        expected, _ = serve(case, engine, alone)
        assert [answer.token_ids(index) for index in range(3)] == [one.token_ids() for one in expected]
        assert len({tuple(answer.token_ids(index)) for index in range(3)}) == 3
        for index in range(3):
            check_answer(case, request, answer.drawn[index])


@pytest.mark.parametrize("precision", ["f32", "bf16", "f16", "u8"])
def test_a_copied_block_is_continued_exactly_like_its_original(case, precision):
    """Bit for bit, also where the cache is quantized: scales and zero points are part of a block."""
    engine = case.open_engine(precision)
    prompt = prompts_of(case, (0, 45))[1]
    engine.step([SequenceStep(prompt, 0, [3, 5])])
    engine.copy_blocks([(3, 8), (5, 9), (9, 6), (8, 1)])
    following = prompts_of(case, (0, 12))[1]

    def go_on(*table):
        rows = [
            engine.step([SequenceStep([token_id], 45 + i, table)])[0].copy() for i, token_id in enumerate(following)
        ]
        return np.array(rows)

    copied, again, original = go_on(1, 6), go_on(8, 9), go_on(3, 5)
    np.testing.assert_array_equal(copied, original)
    np.testing.assert_array_equal(again, original)
    assert not np.array_equal(go_on(2, 4), original), "blocks without content must not do"


def test_samples_over_a_quantized_cache_stay_close(case):
    """With u8 a block is quantized again as it fills; copied while it is half full, it must keep what it holds."""
    engine = SharedEngine(case.open_engine("u8"))
    sampling = SamplingParams(temperature=1.0, seed=3, logprobs=0)
    asked = [GenerateRequest(prompt, 24, sampling, n=3) for prompt in prompts_of(case, (31, 75))]
    answers, _ = serve(case, engine, asked)
    for request, answer in zip(asked, answers, strict=True):
        for index in range(3):
            check_answer(case, request, answer.drawn[index], tolerance=QUANTIZED_TOLERANCE)

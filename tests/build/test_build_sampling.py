"""Penalties, bad words, min_p, top_k and top_p mean what transformers' logits processors mean, wherever they agree to.

They differ on purpose, as vLLM does from transformers, in what bad words are matched with (the output, not the prompt),
and top_k keeps exactly k of equal logits; rows here have no equal ones, and prompts are empty for bad words.
"""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tritonforge.generate_request import SamplingParams
from tritonforge.sampling.logits import History
from tritonforge.sampling.sampling import Draw, sample

VOCAB = 24


def logits(seed: int, size: int = VOCAB, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)


def processed(processor, token_ids, row: np.ndarray) -> np.ndarray:
    """`row` after a processor of transformers, for a context of `token_ids`."""
    context = torch.tensor([list(token_ids)], dtype=torch.int64)
    return processor(context, torch.from_numpy(row.copy())[None])[0].numpy()


@pytest.mark.parametrize("penalty", [0.7, 1.0001, 1.3])
def test_the_repetition_penalty_is_that_of_transformers_bit_for_bit(penalty):
    row, prompt, output = logits(1, 1000, 5.0), [1, 2, 3, 900, 2], [5, 5, 700, 1]
    expected = processed(RepetitionPenaltyLogitsProcessor(penalty), prompt + output, row)
    history = History(SamplingParams(repetition_penalty=penalty), prompt)
    for token_id in output:
        history.append(token_id)
    history.apply(row)
    assert (row == expected).all()


def test_bad_words_are_those_of_transformers():
    words, output = (
        [[4], [1, 2, 3], [9, 2, 5], [2, 6], [8, 1, 2, 7]],
        [0, 8, 1, 2],
    )  # transformers skips words longer than the context
    row = logits(2)
    expected = processed(NoBadWordsLogitsProcessor(words), output, row)
    history = History(SamplingParams(bad_words=tuple(map(tuple, words))), [])
    for token_id in output:
        history.append(token_id)
    history.apply(row)
    assert (row == expected).all()


@pytest.mark.parametrize(
    ("options", "warper"),
    [
        ({"top_k": 1}, TopKLogitsWarper(1)),
        ({"top_k": 7}, TopKLogitsWarper(7)),
        ({"top_p": 0.2}, TopPLogitsWarper(0.2)),
        ({"top_p": 0.8}, TopPLogitsWarper(0.8)),
        ({"min_p": 0.1}, MinPLogitsWarper(0.1)),
        ({"min_p": 0.5}, MinPLogitsWarper(0.5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.7])
@pytest.mark.parametrize("seed", range(5))
def test_exactly_the_tokens_that_transformers_keeps_are_drawn(options, warper, temperature, seed):
    row = logits(seed)
    warm = processed(TemperatureLogitsWarper(temperature), [0], row) if temperature != 1.0 else row
    kept = processed(warper, [0], warm)
    params = SamplingParams(temperature, seed=seed, **options)
    draws = [Draw(params, index) for index in range(3000)]
    drawn = {one.token_id for one in sample(np.tile(row, (len(draws), 1)), draws)}
    likely = np.exp(kept - kept.max()) / np.exp(kept - kept.max()).sum() > 0.004  # missed once in 160,000 tests
    assert drawn <= set(np.flatnonzero(np.isfinite(kept)).tolist())
    assert set(np.flatnonzero(likely).tolist()) <= drawn

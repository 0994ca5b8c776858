"""Sampling draws from the distribution that temperature, top-k and top-p define, the same for the same seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonforge.request import SamplingParams
from tritonforge.sampling import ROWS, inverse_cdf, sample, top_k, top_p, uniform

VOCAB = 1024


sizes = st.one_of(st.integers(1, 700), st.sampled_from([ROWS, 2 * ROWS, 10 * ROWS]))
"""Lengths that are searched in index order, and such that are searched column by column."""


def logits(seed=0, scale=3.0, size=VOCAB):
    return np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)


def reference(row, params):
    """The distribution [vocab] by sorting everything, in float64."""
    scaled = row.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    if params.top_k:
        weights[order[params.top_k :]] = 0.0
    weights /= weights.sum()
    if params.top_p < 1.0:
        kept = np.searchsorted(np.cumsum(weights[order]), params.top_p) + 1
        weights[order[kept:]] = 0.0
    return weights / weights.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0),
        SamplingParams(0.3),
        SamplingParams(1.0, top_k=5),
        SamplingParams(2.0, top_k=400),
        SamplingParams(0.8, top_p=0.9),
        SamplingParams(1.5, top_p=0.999),
        SamplingParams(1.0, top_k=20, top_p=0.7),
    ],
)
def test_drawn_frequencies_are_those_of_the_sorted_reference(params):
    row, draws = logits(), 4000
    counts = np.zeros(VOCAB)
    for index in range(draws):
        seeded = SamplingParams(params.temperature, params.top_k, params.top_p, seed=11)
        counts[sample(row[None].copy(), [seeded], [index])] += 1
    expected = reference(row, params)
    assert counts[expected == 0].sum() == 0, "a token outside top-k or top-p was drawn"
    # Six standard deviations of a binomial count, and one for the rare ones.
    assert (np.abs(counts - draws * expected) <= 6 * np.sqrt(draws * expected) + 1).all()


def test_greedy_rows_are_untouched_by_sampled_neighbours():
    batch = np.stack([logits(seed) for seed in range(3)])
    greedy, drawn = SamplingParams(), SamplingParams(1.0, seed=1)
    expected = batch.argmax(axis=1).tolist()
    got = sample(batch.copy(), [greedy, drawn, greedy], [0, 0, 0])
    assert (got[0], got[2]) == (expected[0], expected[2])
    assert sample(batch, [greedy] * 3, [0] * 3) == expected


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), size=sizes, k=st.integers(1, 700))
def test_top_k_is_the_sorted_top_k(seed, size, k):
    row = np.round(logits(seed, size=size), 1)  # rounding makes ties
    k = min(k, size)
    assert top_k(row, k).tolist() == sorted(np.argsort(-row, kind="stable")[:k].tolist())


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), size=sizes, p=st.floats(0.01, 0.9999), scale=st.floats(0.01, 30))
def test_top_p_is_the_smallest_set_that_holds_the_mass(seed, size, p, scale):
    row = logits(seed, scale, size)
    weights = np.exp(row - row.max())
    kept = top_p(weights, p)
    total = weights.sum(dtype=np.float64)
    assert weights[kept].sum(dtype=np.float64) >= p * total * (1 - 1e-6)
    larger_than_last = weights[kept][weights[kept] > weights[kept].min()]
    assert larger_than_last.sum(dtype=np.float64) <= p * total * (1 + 1e-6), "a smaller set would do"
    assert weights[kept].min() > np.delete(weights, kept).max(initial=-1.0)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=sizes,
    u=st.floats(0, 1, exclude_max=True),
)
def test_inverse_cdf_finds_the_element_that_covers_u(seed, size, u):
    weights = np.exp(logits(seed, size=size))
    weights[np.random.default_rng(seed).random(size) < 0.3] = 0.0
    weights[size // 2] = 1.0
    index = inverse_cdf(weights, u)
    order = np.arange(size) if size % ROWS else np.arange(size).reshape(ROWS, -1).T.ravel()
    place = int(np.flatnonzero(order == index)[0])
    cumulative = np.cumsum(weights[order], dtype=np.float64) / weights.sum(dtype=np.float64)
    assert weights[index] > 0.0, "an impossible token was drawn"
    assert cumulative[place] >= u - 1e-5
    assert place == 0 or cumulative[place - 1] <= u + 1e-5


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, seed=1)])
def test_logits_that_are_no_numbers_give_no_token_and_leave_the_others_alone(params):
    batch = np.stack([logits(), logits()])
    [expected] = sample(batch[:1].copy(), [params], [0])
    batch[1, 3] = np.nan
    assert sample(batch, [params] * 2, [0, 0]) == [expected, None]


def test_the_coldest_temperature_is_greedy():
    assert sample(logits()[None].copy(), [SamplingParams(1e-300, seed=1)], [0]) == [int(logits().argmax())]


def test_the_random_number_depends_on_seed_and_index_alone():
    numbers = {(seed, index): uniform(seed, index) for seed in (0, 1, 2**63 - 1) for index in range(50)}
    assert len(set(numbers.values())) == len(numbers)
    assert all(uniform(seed, index) == number for (seed, index), number in numbers.items())
    assert 0.4 < np.mean(list(numbers.values())) < 0.6

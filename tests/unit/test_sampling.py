"""Sampling keeps what its options define, tells the model's log-probabilities, and repeats bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonforge.generate_request import SamplingParams
from tritonforge.sampling.logits import History, apply_mask, needs_history
from tritonforge.sampling.sampling import Draw, Drawn, sample, token_logprobs
from tritonforge.sampling.selection import BLOCK, block_sums, draw_nucleus, inverse_cdf, top_k, uniform

VOCAB = 1021
"""Not a multiple of a block, so rows of a batch lie at different alignments."""

sizes = st.one_of(st.integers(1, 700), st.sampled_from([BLOCK, 2 * BLOCK, 10 * BLOCK, 4099]))
"""Lengths of one block and of several, with and without a shorter last one."""


def logits(seed=0, scale=3.0, size=VOCAB):
    return np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)


def draw_one(row, params, **given):
    [drawn] = sample(row[None].copy(), [Draw(params, given.pop("index", 0), **given)])
    return drawn


def bitmask(allowed, size=VOCAB):
    bits = np.zeros(-(-size // 32) * 32, bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


# what is kept


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), size=sizes, k=st.integers(1, 700))
def test_top_k_is_the_sorted_top_k(seed, size, k):
    row = np.round(logits(seed, size=size), 1)  # rounding makes ties
    k = min(k, size)
    assert top_k(row, k).tolist() == sorted(np.argsort(-row, kind="stable")[:k].tolist())


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), allowed=st.integers(1, 40), k=st.integers(1, 20))
def test_top_k_never_takes_forbidden_elements(seed, allowed, k):
    row = np.full(4099, -np.inf, np.float32)
    places = np.random.default_rng(seed).choice(len(row), allowed, replace=False)
    row[places] = logits(seed, size=allowed)
    kept = top_k(row, k)
    assert set(kept.tolist()) <= set(places.tolist())
    assert len(kept) == min(k, allowed)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), size=sizes, p=st.floats(0.01, 1.0), scale=st.floats(0.01, 30))
def test_every_draw_is_in_the_sorted_nucleus(seed, size, p, scale):
    weights = np.exp(np.round(logits(seed, scale, size) - 40.0, 1))
    order = np.sort(weights.astype(np.float64))[::-1]
    mass = np.cumsum(order)
    smallest = order[min(np.searchsorted(mass, p * mass[-1] * (1 + 1e-6)), size - 1)]
    for index in range(20):
        assert weights[draw_nucleus(weights, 0.0, p, seed, index)] >= smallest


def test_a_nucleus_holds_all_that_equal_its_smallest_weight():
    weights = np.array([0.5, 0.25, 0.25, 0.25, 0.1], np.float32)
    drawn = {draw_nucleus(weights, 0.0, 0.5, 1, index) for index in range(400)}
    assert drawn == {0, 1, 2, 3}, "0.5 + 0.25 of 1.35 is enough, but the three are equal"


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), size=sizes, floor=st.one_of(st.just(0.0), st.floats(1e-3, 3.0)))
def test_block_sums_add_the_weights_over_the_floor(seed, size, floor):
    weights = np.exp(logits(seed, 1.0, size))
    sums = block_sums(weights, floor)
    kept = np.where(weights > np.float32(floor), weights, 0.0).astype(np.float64)
    expected = [kept[start : start + BLOCK].sum() for start in range(0, size, BLOCK)]
    assert np.allclose(sums, expected, rtol=1e-5)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), size=sizes, u=st.floats(0, 1, exclude_max=True), floor=st.sampled_from([0.0, 0.5]))
def test_inverse_cdf_finds_the_element_that_covers_u(seed, size, u, floor):
    weights = np.exp(logits(seed, size=size))
    weights[np.random.default_rng(seed).random(size) < 0.3] = 0.0
    weights[size // 2] = 1.0
    index = inverse_cdf(weights, floor, block_sums(weights, floor).cumsum(dtype=np.float64), u)
    assert weights[index] > floor, "an impossible token was drawn"
    cumulative = np.cumsum(np.where(weights > floor, weights, 0.0), dtype=np.float64)
    cumulative /= cumulative[-1]
    assert cumulative[index] >= u - 1e-5
    assert index == 0 or cumulative[index - 1] <= u + 1e-5


def test_min_p_keeps_what_reaches_its_part_of_the_largest_after_temperature():
    row = np.log(np.array([0.4, 0.2, 0.2, 0.1, 0.1], np.float32))
    few = {draw_one(row, SamplingParams(1.0, seed=1, min_p=0.4), index=index).token_id for index in range(300)}
    assert few == {0, 1, 2}
    hot = {draw_one(row, SamplingParams(4.0, seed=1, min_p=0.6), index=index).token_id for index in range(300)}
    assert hot == {0, 1, 2, 3, 4}, "(0.1 / 0.4) ** (1 / 4) is 0.71"


@pytest.mark.parametrize("min_p", [1e-4, 1.0], ids=["most tokens reach it", "only the largest reaches it"])
def test_min_p_works_on_long_rows(min_p):
    row = logits(scale=1.0, size=4099)
    for index in range(50):
        token_id = draw_one(row, SamplingParams(1.0, seed=1, min_p=min_p), index=index).token_id
        assert row[token_id] >= row.max() + np.log(min_p) - 1e-5


# greedy, and rows that cannot be drawn from


def test_greedy_rows_are_untouched_by_sampled_neighbours():
    batch = np.stack([logits(seed) for seed in range(3)])
    greedy, drawn = Draw(SamplingParams(), 0), Draw(SamplingParams(1.0, seed=1, top_p=0.9), 0)
    expected = [Drawn(token_id) for token_id in batch.argmax(axis=1).tolist()]
    got = sample(batch.copy(), [greedy, drawn, greedy])
    assert (got[0], got[2]) == (expected[0], expected[2])
    assert sample(batch, [greedy] * 3) == expected


def test_top_k_of_1_is_greedy_even_where_logits_tie():
    row = np.zeros(VOCAB, np.float32)
    row[[7, 900]] = 2.0
    for index in range(20):
        assert draw_one(row, SamplingParams(1.0, top_k=1, seed=1), index=index).token_id == 7


def test_the_coldest_temperature_is_greedy():
    assert draw_one(logits(), SamplingParams(1e-300, seed=1)).token_id == logits().argmax()


@pytest.mark.parametrize("offset", [-3e4, -200.0, 90.0, 3e4])
def test_logits_far_from_zero_are_drawn_like_others(offset):
    row = np.round(logits(), 1)
    expected = [draw_one(row, SamplingParams(1.0, seed=1, top_p=0.9), index=index) for index in range(20)]
    assert expected == [
        draw_one(np.float32(offset) + row, SamplingParams(1.0, seed=1, top_p=0.9), index=index) for index in range(20)
    ]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, seed=1), SamplingParams(logprobs=2)])
def test_logits_that_are_no_numbers_give_no_token_and_leave_the_others_alone(params):
    batch = np.stack([logits(), logits()])
    [expected] = sample(batch[:1].copy(), [Draw(params, 0)])
    batch[1, 3] = np.nan
    assert sample(batch, [Draw(params, 0)] * 2) == [expected, None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_allowed_gives_no_token(temperature):
    params = SamplingParams(temperature, seed=1)
    assert draw_one(logits(), params, mask=bitmask([])) is None
    assert draw_one(logits(), params, mask=bitmask([5]), forbidden=(5,)) is None


# options that change logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_and_forbidden_ids_leave_the_best_of_the_rest(temperature):
    params, row = SamplingParams(temperature, top_k=1, seed=1), logits()
    allowed = [3, 31, 32, 700, VOCAB - 1]
    best = max(allowed, key=lambda token_id: row[token_id])
    assert draw_one(row, params, mask=bitmask(allowed)).token_id == best
    second = max(set(allowed) - {best}, key=lambda token_id: row[token_id])
    assert draw_one(row, params, mask=bitmask(allowed), forbidden=(best,)).token_id == second


def test_tokens_beyond_a_shorter_mask_are_forbidden():
    row = np.zeros(100, np.float32)
    apply_mask(row, np.array([-1, 5], np.int32))
    assert np.flatnonzero(row == 0.0).tolist() == [*range(32), 32, 34]


@given(
    prompt=st.lists(st.integers(0, 30), max_size=40),
    output=st.lists(st.integers(0, 30), max_size=200),
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    presence=st.sampled_from([0.0, -1.0, 0.7]),
    frequency=st.sampled_from([0.0, -0.2, 0.4]),
)
@settings(max_examples=100, deadline=None)
def test_penalties_are_those_of_their_definitions(prompt, output, repetition, presence, frequency):
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=((2, 1.5),)
    )
    history, row = History(params, prompt), logits(size=31)
    for token_id in output:
        history.append(token_id)
    expected = row.astype(np.float64)
    expected[2] += 1.5
    for token_id in set(prompt) | set(output):
        value = expected[token_id]
        expected[token_id] = value / repetition if value > 0 else value * repetition
    for token_id in set(output):
        expected[token_id] -= frequency * output.count(token_id) + presence
    history.apply(row)
    assert np.allclose(row, expected, atol=1e-4)


def test_a_history_holds_any_number_of_distinct_tokens():
    params, row = SamplingParams(presence_penalty=1.0), np.zeros(5000, np.float32)
    history = History(params, [])
    for token_id in range(0, 5000, 2):
        history.append(token_id)
    history.apply(row)
    assert (row[::2] == -1.0).all()
    assert (row[1::2] == 0.0).all()


def test_the_last_token_of_a_bad_word_is_forbidden_when_the_output_ends_with_the_others():
    params = SamplingParams(bad_words=((4,), (1, 2, 3), (9, 2, 5), (2, 6)))
    history, row = History(params, [9]), np.zeros(10, np.float32)
    for token_id in (1, 2):
        history.append(token_id)
    history.apply(row)
    assert np.flatnonzero(np.isinf(row)).tolist() == [3, 4, 6], "9 is in the prompt, which is no output"


def test_a_bias_of_a_repeated_id_counts_once():
    history, row = History(SamplingParams(logit_bias=((1, 5.0), (1, 2.0))), []), np.zeros(3, np.float32)
    history.apply(row)
    assert row.tolist() == [0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    "option",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": ((1, 1.0),)},
        {"bad_words": ((1,),)},
    ],
)
def test_an_option_that_needs_a_history_is_never_ignored_without_one(option):
    params = SamplingParams(**option)
    assert needs_history(params)
    with pytest.raises(ValueError, match="needs the history"):
        draw_one(logits(), params)
    with pytest.raises(ValueError, match="needs the history"):
        draw_one(logits(), params, mask=bitmask([1]))


# log-probabilities


def log_softmax(row):
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


@pytest.mark.parametrize("offset", [0.0, -300.0, 300.0])
@pytest.mark.parametrize("top", [0, 1, 20])
@pytest.mark.parametrize("size", [21, VOCAB, 8192])
def test_logprobs_are_those_of_the_model_before_any_option(size, top, offset):
    row = logits(size=size) + np.float32(offset)
    expected = log_softmax(row)
    params = SamplingParams(0.7, seed=3, top_k=5, logit_bias=((4, 30.0),), logprobs=top)
    drawn = draw_one(row, params, history=History(params, []), forbidden=(int(row.argmax()),))
    assert drawn.token_id == 4
    assert drawn.logprob == pytest.approx(expected[4], abs=1e-4)
    order = np.argsort(-row, kind="stable")[:top]
    assert [token_id for token_id, _ in drawn.top] == order.tolist()
    assert [logprob for _, logprob in drawn.top] == pytest.approx(expected[order].tolist(), abs=1e-4)


def test_asking_for_logprobs_changes_no_token():
    for index in range(50):
        plain = draw_one(logits(), SamplingParams(1.0, seed=5, top_p=0.9), index=index)
        assert draw_one(logits(), SamplingParams(1.0, seed=5, top_p=0.9, logprobs=3), index=index).token_id == (
            plain.token_id
        )
        assert plain.logprob is None


def test_prompt_logprobs_are_those_of_the_given_tokens():
    rows = np.stack([logits(seed) for seed in range(3)])
    rows[2, 5] = np.nan
    told = token_logprobs(rows, [4, 900, 1], 2)
    assert told[2] is None
    for row, one, token_id in zip(rows, told, [4, 900], strict=False):
        expected = log_softmax(row)
        assert one.token_id == token_id
        assert one.logprob == pytest.approx(expected[token_id], abs=1e-4)
        assert [place for place, _ in one.top] == np.argsort(-row)[:2].tolist()


# repetition


def test_a_seeded_draw_is_the_same_bit_for_bit_alone_and_in_a_batch():
    options = [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"logprobs": 5}, {"repetition_penalty": 1.2}]
    params = [SamplingParams(1.0, seed=row, **options[row % len(options)]) for row in range(16)]
    rows = np.stack([logits(seed) for seed in range(16)])
    for index in range(20):
        draws = [Draw(one, index, History(one, [1, 2, 3]) if needs_history(one) else None) for one in params]
        alone = [sample(row[None].copy(), [draw])[0] for row, draw in zip(rows, draws, strict=True)]
        assert sample(rows.copy(), draws) == alone
        assert sample(rows[::-1].copy(), draws[::-1]) == alone[::-1]


def test_the_random_number_depends_on_seed_index_and_attempt_alone():
    keys = [(seed, index, attempt) for seed in (0, 1, 2**63 - 1) for index in range(50) for attempt in range(3)]
    numbers = {key: uniform(*key) for key in keys}
    assert len(set(numbers.values())) == len(numbers)
    assert all(uniform(*key) == number for key, number in numbers.items())
    assert uniform(7, 3) == uniform(7, 3, 0)
    assert 0.4 < np.mean(list(numbers.values())) < 0.6

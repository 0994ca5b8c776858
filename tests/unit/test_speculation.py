"""Prompt lookup: drafts that continue what was there before, only where they are expected to pay."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonforge.errors import InvalidRequest
from tritonforge.scheduling.request import Request
from tritonforge.scheduling.speculation import (
    DRAFT_LENGTH,
    NGRAM_SIZES,
    PRIOR,
    Acceptance,
    Drafting,
    PromptLookup,
    Speculation,
    StepCost,
)

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)
FREE = StepCost(per_draft=0.0, per_draft_token=0.0, per_change=0.0)


def search(tokens):
    """By brute force: where the latest earlier occurrence of the longest indexed n-gram at the end goes on, or None."""
    for size in NGRAM_SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return end
    return None


def match_length(tokens, guess):
    length = 0
    while length < min(guess, len(PRIOR)) and tokens[guess - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


@given(texts, texts)
def test_an_index_that_grows_finds_what_a_search_of_the_whole_text_finds(prompt, output):
    lookup = PromptLookup(prompt)
    tokens = list(prompt)
    for token_id in [*output, None]:
        guess = search(tokens)
        assert lookup.propose(1) == ([] if guess is None else [tokens[guess]])
        assert lookup.match == (0 if guess is None else match_length(tokens, guess))
        if token_id is not None:
            lookup.append(token_id)
            tokens.append(token_id)
    assert len(lookup) == len(tokens)


@given(texts, st.integers(0, 40))
def test_a_draft_continues_an_earlier_occurrence_of_the_end(tokens, most):
    draft = PromptLookup(tokens).propose(most)
    guess = search(tokens)
    assert len(draft) == (0 if guess is None else most)
    for index, token_id in enumerate(draft):
        assert token_id == (tokens + draft)[guess + index]


def test_the_longest_match_is_preferred_to_a_later_short_one():
    assert PromptLookup([1, 2, 3, 4, 7, 3, 9, 1, 2, 3]).propose(2) == [4, 7]


def test_of_equal_matches_the_latest_is_taken():
    assert PromptLookup([5, 1, 5, 2, 5]).propose(1) == [2]


def test_a_draft_past_the_end_repeats_its_own_start():
    assert PromptLookup([9, 1, 2, 1, 2]).propose(5) == [1, 2, 1, 2, 1]


@given(texts, st.integers(1, 12))
def test_the_expected_number_is_the_sum_of_the_chances_that_each_token_and_all_before_it_come_true(tokens, length):
    lookup = PromptLookup(tokens)
    rates = [lookup.acceptance.rate(lookup.match + index) for index in range(length if lookup.match else 0)]
    chances = [math.prod(rates[: count + 1]) for count in range(len(rates))]
    assert lookup.expected(length) == pytest.approx(sum(chances))


def follow(speculation, request, tokens):
    """Whether a draft was proposed before each of `tokens`."""
    drafted = []
    for token_id in tokens:
        drafted.append(bool(speculation.propose(request, DRAFT_LENGTH)))
        request.output_ids.append(token_id)
    return drafted


def test_drafts_stop_on_random_text_and_come_back_when_it_begins_to_repeat():
    rng = random.Random(4)
    vocabulary = 60  # small: nearly each token was there before, and its successor tells nothing
    speculation, request = Speculation(lambda: 1), Request(0, [1], 10_000)
    assert sum(follow(speculation, request, [rng.randrange(vocabulary) for _ in range(1000)])) < 20
    sentence = [rng.randrange(vocabulary) for _ in range(40)]
    follow(speculation, request, sentence)
    again = follow(speculation, request, sentence)
    assert all(again[8:])
    assert list(speculation.propose(request, DRAFT_LENGTH))
    assert sum(follow(speculation, request, [rng.randrange(vocabulary) for _ in range(200)])) < 40


def test_a_large_batch_does_not_draft_what_a_lone_request_would():
    tokens = [*range(40), *range(4)]
    drafted = [bool(Speculation(lambda n=n: n).propose(Request(0, tokens, 100), 8)) for n in (1, 2, 4, 8, 16, 64)]
    assert drafted[0]
    assert not drafted[-1]
    assert drafted == sorted(drafted, reverse=True)


def test_a_request_that_drafts_stops_when_the_batch_grows():
    running = [1]
    cost = StepCost(per_sequence=0.0)
    speculation, request = Speculation(lambda: running[0], cost), Request(0, [*range(40), *range(10)], 100)
    assert all(follow(speculation, request, range(10, 20)))
    running[0] = 32
    assert not any(follow(speculation, request, range(20, 38))[14:])


def test_sequences_of_a_batch_share_the_cost_of_another_number_of_rows():
    """Wrong: sixteen answers that all repeat themselves would not draft, and take twice as long."""
    tokens = [*range(40), *range(30)]
    assert all(Speculation(lambda n=n: n).propose(Request(0, tokens, 100), 8) for n in (1, 4, 16))


@given(st.lists(st.floats(0.0, 10.0), max_size=50), st.integers(1, 64))
def test_drafting_begins_only_for_what_pays_the_change_and_ends_only_below_the_cost(gains, num_running):
    cost = StepCost()
    drafting = Drafting(cost)
    for gain in gains:
        before = drafting.on
        after = drafting.update(gain, num_running)
        if not before and after:
            assert gain >= cost.of_draft(DRAFT_LENGTH) + 2 * cost.per_change / num_running
        if before and not after:
            assert gain < 1.5 * cost.of_draft(DRAFT_LENGTH)


def test_long_matches_that_fail_again_and_again_are_believed_less_and_recover():
    acceptance = Acceptance()
    longest = len(PRIOR)
    before = acceptance.rate(longest)
    for _ in range(50):
        acceptance.observe(longest, correct=False)
    failed = acceptance.rate(longest)
    assert failed < 0.4 * before
    assert acceptance.rate(1) == PRIOR[0]
    for _ in range(50):
        acceptance.observe(longest + 100, correct=True)
    assert acceptance.rate(longest) > 0.8 * before


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=200))
def test_an_acceptance_rate_stays_a_probability(observations):
    acceptance = Acceptance()
    for match, correct in observations:
        acceptance.observe(match, correct=correct)
        assert 0.0 < acceptance.rate(match) < 1.0


@given(texts, texts, st.lists(st.integers(1, 5)))
def test_a_request_is_followed_whatever_number_of_tokens_it_gains_between_drafts(prompt, output, gains):
    speculation = Speculation(lambda: 1, FREE)
    request = Request(7, tuple(prompt), 1000)
    rest = iter(output)
    for gain in gains:
        request.output_ids += [token_id for _, token_id in zip(range(gain), rest, strict=False)]
        tokens = prompt + request.output_ids
        guess = search(tokens)
        [first, *_] = speculation.propose(request, DRAFT_LENGTH)
        assert first == (tokens[-1] if guess is None else tokens[guess])


@given(texts, st.integers(0, 100), st.integers(1, 50))
def test_a_draft_has_always_the_same_length_or_is_none(prompt, most, num_running):
    draft = Speculation(lambda: num_running).propose(Request(0, prompt, 1000), most)
    assert len(draft) in (0, DRAFT_LENGTH)
    assert len(draft) <= most


def test_requests_do_not_learn_from_each_other_and_are_forgotten_when_they_end():
    speculation = Speculation(lambda: 1, FREE)
    repeating, other = Request(1, [1, 2, 3, 1, 2], 100), Request(2, [1, 2], 100)
    assert speculation.propose(repeating, 8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert speculation.propose(other, 8) == [2] * 8
    assert len(speculation) == 2
    speculation.forget(1)
    speculation.forget(1)
    speculation.forget(99)
    assert len(speculation) == 1
    assert speculation.propose(Request(1, [4, 5], 100), 8) == [5] * 8


def test_the_work_of_a_token_does_not_grow_with_the_text():
    class Counting(dict):
        calls = 0

        def get(self, key):
            Counting.calls += 1
            return super().get(key)

        def __setitem__(self, key, value):
            Counting.calls += 1
            super().__setitem__(key, value)

    rng = random.Random(1)
    lookup = PromptLookup([])
    lookup._follows = Counting()
    for _ in range(3000):
        lookup.append(rng.randrange(5))
    assert Counting.calls <= 3000 * 2 * len(NGRAM_SIZES)


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_a_step_cost_that_is_no_cost_is_refused_by_name(value):
    with pytest.raises(InvalidRequest, match=r"speculation\.per_draft_token must be finite and at least 0"):
        StepCost(per_draft_token=value)

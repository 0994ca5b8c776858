"""Prompt lookup: drafts that continue what was there before, only where they are expected to pay."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonforge.errors import InvalidRequest
from tritonforge.request import Request
from tritonforge.speculation import MAX_DRAFT, NGRAM_SIZES, PRIOR, Acceptance, PromptLookup, Speculation, StepCost

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)
FREE = StepCost(per_draft=0.0, per_draft_token=0.0)


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


@given(texts, st.integers(0, 20), st.integers(1, 40))
def test_the_paying_length_has_the_greatest_expected_gain(tokens, most, num_running):
    lookup, cost = PromptLookup(tokens), StepCost()
    gains = [0.0]
    chance = 1.0
    gain = -cost.per_draft
    for index in range(most if lookup.match else 0):
        chance *= lookup.acceptance.rate(lookup.match + index)
        gain += chance * cost.per_token(num_running) - cost.per_draft_token
        gains.append(gain)
    assert gains[lookup.paying_length(most, cost, num_running)] == pytest.approx(max(gains))


def test_more_running_sequences_make_shorter_drafts_until_there_are_none():
    lookup = PromptLookup([*range(30), *range(6)])
    lengths = [lookup.paying_length(MAX_DRAFT, StepCost(), running) for running in (1, 4, 8, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[2] > lengths[3] == 0


def test_drafts_stop_on_random_text_and_come_back_when_it_begins_to_repeat():
    rng = random.Random(4)
    lookup = PromptLookup([])
    vocabulary = 60  # small: nearly each token was there before, and its successor tells nothing
    for _ in range(1500):
        lookup.append(rng.randrange(vocabulary))
    asked = paid = 0
    for _ in range(300):
        lookup.append(rng.randrange(vocabulary))
        asked += lookup.match > 0
        paid += lookup.paying_length(MAX_DRAFT, StepCost(), 1) > 0
    assert asked > 250
    assert paid < 0.1 * asked
    sentence = [rng.randrange(vocabulary) for _ in range(40)]
    for token_id in sentence + sentence[:10]:
        lookup.append(token_id)
    assert lookup.paying_length(MAX_DRAFT, StepCost(), 1) > 5
    assert lookup.propose(8) == sentence[10:18]


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
        draft = list(speculation.propose(request, 5))
        assert len(draft) == (0 if guess is None else 5)
        assert draft[:1] == ([] if guess is None else [tokens[guess]])


@given(texts, st.integers(0, 100), st.integers(1, 50))
def test_a_draft_is_never_longer_than_asked_for_or_than_the_limit(prompt, most, num_running):
    draft = Speculation(lambda: num_running).propose(Request(0, prompt, 1000), most)
    assert len(draft) <= min(most, MAX_DRAFT)


def test_a_draft_ends_with_a_stop_token():
    request = Request(0, [1, 2, 3, 4, 5, 6, 7, 8, 50, 9, 1, 2, 3, 4, 5, 6], 100, frozenset({50}))
    assert Speculation(lambda: 1).propose(request, 10) == [7, 8, 50]


def test_requests_do_not_learn_from_each_other_and_are_forgotten_when_they_end():
    speculation = Speculation(lambda: 1, FREE)
    repeating, other = Request(1, [1, 2, 3, 1, 2], 100), Request(2, [1, 2], 100)
    assert speculation.propose(repeating, 2) == [3, 1]
    assert speculation.propose(other, 2) == []
    assert len(speculation) == 2
    speculation.forget(1)
    speculation.forget(1)
    speculation.forget(99)
    assert len(speculation) == 1
    assert speculation.propose(Request(1, [4, 5], 100), 2) == []


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

"""Options of how an answer is drawn, where it ends and what is told of it: each does what docs/options.md says.

Each test would fail if its option were accepted and ignored.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.server

QUESTION = "What is the capital of France?"
COUNTING = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"
CHANCES = ("Once upon a time", {"temperature": 3.0, "top_k": 8, "max_tokens": 8})
"""Eight tokens of nearly equal chance at each step: what another seed draws agrees in one token of eight."""


# where it ends


def test_max_tokens_is_the_length_of_an_answer_that_nothing_else_ends(ask):
    for length in (1, 7, 30):
        answer = ask(ignore_eos=True, max_tokens=length)
        assert (len(answer.token_ids), answer.finish_reason) == (length, "length")
        assert answer.statistics["completion_tokens"] == length


def test_min_tokens_holds_back_end_tokens_and_stop_strings(ask):
    ended = ask(QUESTION, chat=True, max_tokens=40)
    stopped = ask(stop=".", max_tokens=40)
    assert ended.finish_reason == stopped.finish_reason == "stop"
    least = len(ended.token_ids) + 4
    longer = ask(QUESTION, chat=True, max_tokens=40, min_tokens=least)
    assert len(longer.token_ids) >= least
    assert longer.token_ids[: len(ended.token_ids) - 1] == ended.token_ids[:-1]
    assert len(ask(stop=".", max_tokens=40, min_tokens=10).token_ids) >= 10 > len(stopped.token_ids)


def test_stop_ends_the_answer_before_the_first_of_its_strings(ask):
    whole = ask(max_tokens=24).text
    one, several = ask(max_tokens=24, stop="\n\n"), ask(max_tokens=24, stop=["States", "\n\n", "Lyon"])
    assert one.text == several.text == whole[: whole.index("\n\n")]
    assert one.finish_reason == several.finish_reason == "stop"


def test_stop_token_ids_end_the_answer_unshown(ask):
    whole = ask()
    stop = whole.token_ids[3]
    stopped = ask(stop_token_ids=[49000, stop])
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    before = ask(max_tokens=len(stopped.token_ids) - 1)
    assert stopped.text == before.text


def test_include_stop_in_output_shows_what_ended_the_answer(ask):
    whole = ask(max_tokens=24)
    text = ask(max_tokens=24, stop="\n\n", include_stop_in_output=True).text
    assert text == whole.text[: whole.text.index("\n\n")] + "\n\n"
    period = whole.token_ids[1]
    assert ask(stop_token_ids=[period], include_stop_in_output=True).text == " Paris."


def test_ignore_eos_goes_on_after_an_end_token(ask):
    ended = ask(QUESTION, chat=True, max_tokens=40)
    assert ended.finish_reason == "stop"
    going_on = ask(QUESTION, chat=True, max_tokens=40, ignore_eos=True)
    assert (len(going_on.token_ids), going_on.finish_reason) == (40, "length")


# how a token is drawn


def test_temperature_zero_is_greedy_and_more_of_it_is_more_random(ask):
    answers = {t: {ask(temperature=t, seed=seed).token_ids for seed in range(6)} for t in (0.0, 0.01, 1.5)}
    assert len(answers[0.0]) == 1
    assert answers[0.01] == answers[0.0], "a temperature near 0 leaves only the most likely token"
    assert len(answers[1.5]) == 6


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=lambda one: next(iter(one)))
def test_top_k_top_p_and_min_p_at_their_narrowest_leave_the_most_likely_token(ask, options):
    greedy = ask().token_ids
    assert ask(temperature=2.0, seed=1).token_ids != greedy
    assert ask(temperature=2.0, seed=1, **options).token_ids == greedy


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}], ids=lambda one: next(iter(one)))
def test_top_k_top_p_and_min_p_draw_from_the_tokens_that_their_definition_keeps(ask, options):
    """The first token's distribution is known from its log-probabilities, and so is what may be drawn from it."""
    top = ask(max_tokens=1, logprobs=20)
    chances = {i: math.exp(value) for i, value in zip(top.output("top_ids"), top.output("top_logprobs"), strict=True)}
    ranked = sorted(chances, key=chances.get, reverse=True)
    before = [sum(chances[i] for i in ranked[:position]) for position in range(len(ranked))]
    kept = {
        "top_k": set(ranked[:3]),
        "top_p": {i for i, mass in zip(ranked, before, strict=True) if mass < 0.5},
        "min_p": {i for i in ranked if chances[i] >= 0.3 * chances[ranked[0]]},
    }[next(iter(options))]
    drawn = {ask(max_tokens=1, temperature=1.0, seed=seed, **options).token_ids[0] for seed in range(24)}
    assert drawn <= kept
    assert len({ask(max_tokens=1, temperature=1.0, seed=seed).token_ids[0] for seed in range(24)} - kept) > 0


def test_a_seed_repeats_its_answer_alone_and_among_fifteen_others(ask):
    """Another batch moves logits a little, so an answer may leave its way at a near-tie; by chance it would at once."""
    text, options = CHANCES
    alone = [ask(text, seed=seed, **options).token_ids for seed in range(16)]
    assert [ask(text, seed=seed, **options).token_ids for seed in range(4)] == alone[:4]
    assert len(set(alone)) == 16
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda seed: ask(text, seed=seed, **options).token_ids, range(16)))
    common = [num_common(*pair) for pair in zip(alone, together, strict=True)]
    by_chance = [num_common(*pair) for pair in zip(alone, alone[1:] + alone[:1], strict=True)]
    assert sum(common) >= 32 > 4 * sum(by_chance), f"common tokens of 8: {common}, of other seeds {by_chance}"


def num_common(one, other):
    """How many tokens two answers begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def test_without_a_seed_each_answer_is_another(ask):
    text, options = CHANCES
    assert len({ask(text, **options).token_ids for _ in range(4)}) == 4


def test_a_repetition_penalty_keeps_away_from_tokens_of_prompt_and_answer(ask):
    prompt = ask(COUNTING, echo=True, max_tokens=1).output("prompt_token_ids")
    plain = ask(COUNTING, max_tokens=24, ignore_eos=True)
    assert set(plain.token_ids) & set(prompt)
    penalized = ask(COUNTING, max_tokens=24, ignore_eos=True, repetition_penalty=10.0)
    assert not set(penalized.token_ids) & set(prompt)
    assert len(set(penalized.token_ids)) == 24


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.8), (1.0, 0.5), (-2.0, 0.0)])
def test_presence_and_frequency_penalties_obey_their_definition(ask, presence, frequency):
    """The drawn token has the largest logit, less presence if it came before, less frequency for each time it did."""
    options = {"max_tokens": 40, "ignore_eos": True, "speculate": False}
    text = "Once upon a time"
    answer = ask(text, presence_penalty=presence, frequency_penalty=frequency, logprobs=20, **options)
    assert answer.token_ids != ask(text, **options).token_ids
    ids, values = answer.output("top_ids"), answer.output("top_logprobs")
    for position, drawn in enumerate(answer.token_ids):
        before = answer.token_ids[:position]
        row = range(20 * position, 20 * position + 20)
        score = {ids[i]: values[i] - presence * (ids[i] in before) - frequency * before.count(ids[i]) for i in row}
        assert score[drawn] >= max(score.values()) - 1e-3


def test_logit_bias_forces_and_forbids_tokens(ask):
    first = ask(max_tokens=1).token_ids[0]
    assert set(ask(logit_bias='{"28": 100}', max_tokens=4).token_ids) == {28}
    assert first not in ask(logit_bias=f'{{"{first}": -100}}').token_ids


def test_bad_words_never_appear_and_the_answer_goes_on(ask):
    words = ask(max_tokens=40).text.split()
    pair, single = " ".join(words[2:4]), words[0].strip(".")
    answer = ask(max_tokens=40, bad_words=[single, pair])
    assert single == "Paris" and single not in answer.text and pair not in answer.text
    assert len(answer.token_ids) == 40


# what is told


def test_logprobs_come_with_each_token_and_the_most_likely_first(ask):
    answer = ask(logprobs=5, max_tokens=10)
    chosen, ids, values = (answer.output(name) for name in ("logprobs", "top_ids", "top_logprobs"))
    assert len(chosen) == len(answer.token_ids) == 10 and len(ids) == len(values) == 50
    assert ids[::5] == answer.token_ids, "the greedy token is the most likely one"
    assert values[::5] == pytest.approx(chosen, abs=1e-5)
    for row in (values[start : start + 5] for start in range(0, 50, 5)):
        assert list(row) == sorted(row, reverse=True)
        assert sum(map(math.exp, row)) <= 1.0 + 1e-5
    bare = ask(logprobs=0, max_tokens=10)
    assert bare.output("logprobs") == pytest.approx(chosen, abs=1e-5) and not bare.output("top_ids")
    assert not ask(max_tokens=10).output("logprobs")


def test_logprobs_are_the_models_own_before_any_option(ask):
    plain = ask(logprobs=20, max_tokens=1)
    forced, told = plain.output("top_ids")[5], plain.output("top_logprobs")[5]
    biased = ask(logprobs=20, logit_bias=f'{{"{forced}": 100}}', max_tokens=1)
    assert biased.token_ids == (forced,)
    assert biased.output("logprobs")[0] == pytest.approx(told, abs=1e-4)
    assert biased.output("top_ids") == plain.output("top_ids")


def test_prompt_logprobs_are_those_of_a_request_that_generates_the_same_tokens(ask):
    prompt = ask(echo=True, max_tokens=1).output("prompt_token_ids")
    generated = ask(logprobs=2, max_tokens=20)
    whole = [*prompt, *generated.token_ids]
    told = ask(model="decoder", input_ids=whole, prompt_logprobs=2, max_tokens=1)
    assert told.output("prompt_token_ids") == tuple(whole)
    assert len(told.output("prompt_logprobs")) == len(whole) - 1
    assert len(told.output("prompt_top_ids")) == len(told.output("prompt_top_logprobs")) == 2 * (len(whole) - 1)
    tail = told.output("prompt_logprobs")[len(prompt) - 1 :]
    assert tail == pytest.approx(generated.output("logprobs"), abs=0.3), "prefill computes in bf16, decode in f32"


def test_echo_puts_the_prompt_before_the_answer(ask):
    plain, echoed = ask(), ask(echo=True)
    assert echoed.text == "The capital of France is" + plain.text
    assert len(echoed.output("prompt_token_ids")) == echoed.statistics["prompt_tokens"]
    assert echoed.token_ids == plain.token_ids and not plain.output("prompt_token_ids")

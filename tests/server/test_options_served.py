"""Options of how many answers there are, how they are sent, and when and with what they are computed."""

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from tritonforge.client import infer_request, stream
from tritonforge.errors import DeadlineExceeded, Overloaded

pytestmark = pytest.mark.server

TIMEOUT_S = 120.0
COUNTING = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"
REPEATING = "a b c d e f g h " * 12


# how many answers


@pytest.mark.parametrize("streamed", [False, True])
def test_n_answers_are_distinct_at_a_temperature_and_repeat_with_their_seed(ask, streamed):
    options = {"n": 4, "temperature": 1.5, "seed": 5, "stream": streamed, "max_tokens": 10, "ignore_eos": True}
    answer = ask(**options)
    samples = answer.samples()
    assert sorted(samples) == [0, 1, 2, 3]
    assert len({tokens for _, tokens, _ in samples.values()}) == 4
    assert all(len(tokens) == 10 and reason == "length" for _, tokens, reason in samples.values())
    assert answer.statistics["completion_tokens"] == 40
    assert ask(**options).samples() == samples
    first = {**options, "max_tokens": 1, "temperature": 3.0}
    assert ask(**first).samples()[0][1] == ask(**first | {"n": 1}).token_ids, "the first is what one alone would be"
    assert (len(answer.chunks) > 1) == streamed


def test_n_greedy_answers_are_equal(ask):
    """What is counted on has no near-ties: another batch moves logits a little."""
    alone = ask(COUNTING)
    samples = ask(COUNTING, n=3).samples()
    assert set(samples.values()) == {(alone.text, alone.token_ids, alone.finish_reason)}


def test_n_answers_end_each_for_itself(ask):
    answer = ask(n=6, temperature=1.0, seed=3, stop=".", max_tokens=12, stream=True)
    samples = answer.samples()
    assert {reason for _, _, reason in samples.values()} == {"stop", "length"}
    for text, tokens, reason in samples.values():
        assert "." not in text
        assert (len(tokens) == 12) or reason == "stop"


def test_n_answers_give_back_all_their_blocks(ask, await_all_free):
    for _ in range(3):
        ask("word " * 100, n=5, temperature=1.0, max_tokens=20)
    with pytest.raises(DeadlineExceeded):
        ask("word " * 100, n=16, temperature=1.0, max_tokens=1000, ignore_eos=True, timeout_ms=500)
    await_all_free()


# how they are sent


def test_stream_sends_tokens_as_they_come_and_its_absence_sends_one_response(ask):
    whole, streamed = ask(), ask(stream=True)
    assert len(whole.chunks) == 1 < len(streamed.chunks)
    assert (streamed.text, streamed.token_ids) == (whole.text, whole.token_ids)


def test_a_long_stream_interval_gathers_tokens_but_never_the_first(ask):
    often = ask(stream=True, stream_interval_ms=0, max_tokens=30, ignore_eos=True)
    seldom = ask(stream=True, stream_interval_ms=10000, max_tokens=30, ignore_eos=True)
    assert seldom.token_ids == often.token_ids
    assert len(often.chunks) > 4
    assert len(seldom.chunks) == 2, "the first token, and at the end the rest"
    assert len(seldom.chunks[0].token_ids) == 1


# when they are computed


def test_the_more_urgent_priority_class_starts_first(ask, occupied, channel):
    """The urgent request arrives last, gets the one seat that becomes free, and keeps it."""
    held = {"max_tokens": 1000, "ignore_eos": True, "stream": True}
    urgent = stream(channel, infer_request("llm", text="Hi", priority_class=0, **held), TIMEOUT_S)
    with ThreadPoolExecutor(2) as pool, occupied() as seats:
        patient = pool.submit(ask, priority_class=9, max_tokens=1)
        seats.await_waiting(1)
        first = pool.submit(next, urgent)
        seats.await_waiting(2)
        seats.free_one()
        assert first.result(TIMEOUT_S).token_ids
        assert not patient.done(), "the request of class 9 started before that of class 0"
        urgent.close()
        seats.close()
        assert patient.result(TIMEOUT_S).finish_reason == "length"


def test_a_tenant_that_holds_no_seat_goes_before_one_that_holds_all(ask, occupied):
    with ThreadPoolExecutor(1) as pool, occupied("flood") as seats:
        waiting = pool.submit(ask, tenant="flood", max_tokens=1)
        seats.await_waiting(1)
        assert ask(tenant="other", max_tokens=1, queue_timeout_ms=20000).finish_reason == "length"
        assert not waiting.done(), "the flooding tenant's next request went first"
        seats.close()
        assert waiting.result(TIMEOUT_S).finish_reason == "length"


def test_queue_timeout_ms_ends_a_wait_and_says_when_to_come_back(ask, occupied):
    with occupied():
        with pytest.raises(Overloaded) as refused:
            ask(queue_timeout_ms=300, timeout_ms=20000)
        for words in ("not started within queue_timeout_ms 300", "waited", "retry in about"):
            assert words in str(refused.value)
    assert ask(queue_timeout_ms=60000).finish_reason == "length"


def test_timeout_ms_ends_an_answer_that_takes_longer(ask):
    with pytest.raises(DeadlineExceeded) as ended:
        ask(timeout_ms=200, max_tokens=1500, ignore_eos=True)
    for words in ("not answered within timeout_ms 200", "ms have passed", "tokens were generated"):
        assert words in str(ended.value)
    assert ask(timeout_ms=60000).finish_reason == "length"


def test_only_requests_with_the_same_cache_salt_share_a_prefix(ask):
    text = f"{uuid.uuid4()} " + "The quick brown fox jumps over the lazy dog. " * 12

    def cached(**options):
        return ask(text, max_tokens=1, **options).statistics["cached_tokens"]

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") > 64
    assert cached(cache_salt="b") == 0
    assert cached() == 0
    assert cached() > 64


def test_speculate_false_drafts_nothing_and_the_tokens_are_the_same(ask):
    options = {"text": REPEATING, "max_tokens": 48, "ignore_eos": True}
    drafted, plain = ask(**options, speculate=True), ask(**options, speculate=False)
    assert drafted.token_ids == plain.token_ids == ask(**options).token_ids
    assert plain.statistics["draft_tokens"] == plain.statistics["accepted_tokens"] == 0
    assert 0 < drafted.statistics["accepted_tokens"] <= drafted.statistics["draft_tokens"]
    assert drafted.statistics["decode_steps"] < plain.statistics["decode_steps"]

"""Stop strings and chat messages: what may be shown, what is held back, and what is refused."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tritonforge.chat import ChatTemplate, parse_messages
from tritonforge.errors import InvalidCheckpoint, InvalidRequest
from tritonforge.text import TextStream, find_stop, held_back, text_delta


def decode(token_ids):
    """Token ids are the bytes of a text."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def push_all(stream, token_ids):
    shown = []
    for index, token_id in enumerate(token_ids):
        shown.append(stream.push(token_id, final=index == len(token_ids) - 1))
        if stream.stopped:
            break
    return shown


@given(st.text(max_size=60))
def test_deltas_join_to_the_whole_text_and_never_split_a_character(text):
    shown = push_all(TextStream(decode), list(text.encode()))
    assert "".join(shown) == text
    assert all("\ufffd" not in delta for delta in shown) or "\ufffd" in text


@given(st.binary(min_size=1, max_size=60))
@example(b"\x80" * 40)
@example(b"\x80" * 40 + b"a")
def test_bytes_that_are_no_text_end_as_replacement_characters(raw):
    assert "".join(push_all(TextStream(decode), list(raw))) == decode(raw)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_shown_ends_before_the_earliest_stop_string(text, stops):
    stream = TextStream(decode, tuple(stops))
    shown = "".join(push_all(stream, list(text.encode())))
    # Characters arrive one by one, so the stop string that is complete first ends the text.
    complete = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not complete:
        assert shown == text and not stream.stopped
        return
    seen = text[: min(complete)]
    assert stream.stopped
    assert shown == seen[: find_stop(seen, stops)]


@pytest.mark.parametrize(
    ("text", "stops", "length"),
    [("hello wor", ["world"], 3), ("hello", ["world"], 0), ("aab", ["aabb", "b!"], 3), ("x", ["x"], 0), ("", ["a"], 0)],
)
def test_only_the_longest_possible_start_of_a_stop_string_is_held_back(text, stops, length):
    assert held_back(text, stops) == length


def test_an_unfinished_character_waits_unless_the_answer_ends():
    start = list("é".encode())[:1]
    assert text_delta(decode, [], start, final=False) == ""
    assert text_delta(decode, [], start, final=True) == "\ufffd"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("hello", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[" + "9" * 5000 + "]", "JSON"),
        ('[{"role": "user", "content": "\\ud800"}]', "JSON"),
        ("[]", "at least one message"),
        ('{"role": "user"}', "list"),
        ('["hi"]', "messages[0]"),
        ('[{"role": "user"}]', "exactly the keys"),
        ('[{"role": "user", "content": "a", "name": "b"}]', "exactly the keys"),
        ('[{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]', "messages[1].role"),
        ('[{"role": "user", "content": 1}]', "messages[0].content"),
    ],
)
def test_messages_that_break_a_rule_are_refused_by_index(value, words):
    with pytest.raises(InvalidRequest) as refused:
        parse_messages(value)
    assert words in str(refused.value)


def test_a_template_may_use_what_transformers_offers_and_a_bad_one_is_the_checkpoints_fault():
    source = (
        "{% set today = strftime_now('%Y') %}{{ bos_token }}{{ today }}{% for m in messages %}{% if loop.index > 1 %}"
        "{% break %}{% endif %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{% if not add_generation_prompt %}{{ raise_exception('no prompt') }}{% endif %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"}, strftime=lambda form: f"date {form}")
    messages = [{"role": "user", "content": "é<"}, {"role": "user", "content": "b"}]
    shown = template.render(messages, add_generation_prompt=True)
    assert shown == '<s>date %Y{"role": "user", "content": "é<"}'
    with pytest.raises(InvalidRequest, match="no prompt"):
        template.render(messages, add_generation_prompt=False)
    with pytest.raises(InvalidCheckpoint, match="does not compile"):
        ChatTemplate("{% if %}", {})

"""Prompts: which options go together, and what truncation keeps of text and chats, on a tokenizer of letters."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonforge.contract import MAX_TEXT_BYTES
from tritonforge.errors import InvalidRequest, ReleaseMismatch
from tritonforge.options import parse_options
from tritonforge.prompt import LIMITS_FILE, Prompt, build_prompt, read_max_model_len

USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}


class Letters:
    """Stands in for a tokenizer: a character is a token, a message is its role's first letter and its content."""

    def encode(self, text):
        return ["^", *text]

    def encode_end(self, text, room):
        if room < 2:
            raise InvalidRequest("no room")
        return ["^", *text[-(room - 1) :]]

    def encode_chat(self, messages, tools=None, *, add_generation_prompt=True):
        body = [c for m in messages for c in m["role"][0] + (m["content"] or "-")]
        return ["T"] * len(tools or ()) + body + [">"] * add_generation_prompt


def prompt(text="", max_model_len=None, **options):
    return build_prompt(Letters(), text, parse_options(options), max_model_len)


def written(given):
    return "".join(given.token_ids)


def test_a_prompt_is_text_or_a_user_message_or_a_chat():
    assert written(prompt("hi")) == "^hi"
    assert written(prompt("hi", chat=True)) == "uhi>"
    assert written(prompt("hi", chat=True, add_generation_prompt=False)) == "uhi"
    assert written(prompt(messages=json.dumps([USER]), tools=json.dumps([TOOL]))) == "Tua>"


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "text_input must not be empty"),
        ("", {"chat": True}, "text_input must not be empty"),
        ("a", {"messages": "[]"}, "text_input must be empty"),
        ("a", {"tools": "[]"}, "tools must come with chat or messages"),
        ("a", {"tools": "", "chat": True}, "tools must be JSON"),
        ("a", {"add_generation_prompt": False}, "add_generation_prompt must come with"),
        ("a", {"cancel": "1"}, "cancel"),
        ("a", {"truncate": "oldest"}, "truncate must be none"),
        ("é" * (MAX_TEXT_BYTES // 2 + 1), {}, "text_input must be at most"),
        ("", {"messages": " " * (MAX_TEXT_BYTES + 1)}, "messages must be at most"),
        ("a", {"chat": True, "tools": " " * (MAX_TEXT_BYTES + 1)}, "tools must be at most"),
    ],
)
def test_options_that_do_not_go_together_are_refused(text, options, words):
    with pytest.raises(InvalidRequest, match=words):
        prompt(text, **options)


def test_nothing_is_cut_unless_it_is_asked_for_and_needed():
    assert prompt("abcdef", 4) == Prompt(list("^abcdef"), 0)
    assert prompt("abc", 5, truncate="oldest") == Prompt(list("^abc"), 0)
    assert prompt("abcd", 5, truncate="oldest") == Prompt(list("^bcd"), 1)
    assert prompt("abcd", 5, truncate="oldest", max_tokens=3) == Prompt(list("^d"), 3)
    with pytest.raises(InvalidRequest, match=r"max_tokens must be in \[1, 4\], got 5"):
        prompt("abcd", 5, truncate="oldest", max_tokens=5)


ROLES = st.sampled_from(("system", "user", "assistant", "tool"))
CHATS = st.lists(st.tuples(ROLES, st.text("xyz", max_size=4)), min_size=1, max_size=12).map(
    lambda pairs: [{"role": role, "content": content} for role, content in pairs]
)


@settings(deadline=None)
@given(CHATS, st.integers(2, 40), st.none() | st.integers(1, 8))
def test_a_cut_chat_fits_keeps_system_messages_and_begins_with_a_question(chat, max_model_len, max_tokens):
    options = {"messages": json.dumps(chat), "truncate": "oldest"} | ({"max_tokens": max_tokens} if max_tokens else {})
    whole, room = Letters().encode_chat(chat), max_model_len - (max_tokens or 1)
    starts = [0] + [index for index, message in enumerate(chat) if message["role"] == "user"]
    cuts = [[m for i, m in enumerate(chat) if i >= start or m["role"] == "system"] for start in starts]
    fitting = [ids for ids in map(Letters().encode_chat, cuts) if len(ids) <= room]
    if not fitting or room < 1:
        with pytest.raises(InvalidRequest):
            prompt(max_model_len=max_model_len, **options)
        return
    given = prompt(max_model_len=max_model_len, **options)
    assert given.token_ids == max(fitting, key=len), "the fewest turns are dropped that make it fit"
    assert given.truncated_tokens == len(whole) - len(given.token_ids)


def test_a_long_chat_is_rendered_a_few_times_only():
    class Counting(Letters):
        rendered = 0

        def encode_chat(self, *args, **options):
            Counting.rendered += 1
            return super().encode_chat(*args, **options)

    chat = json.dumps([USER, {"role": "assistant", "content": "b"}] * 1000)
    options = parse_options({"messages": chat, "truncate": "oldest"})
    assert written(build_prompt(Counting(), "", options, 31)) == "uaab" * 7 + ">"
    assert Counting.rendered <= 12


def test_the_last_question_must_fit_by_itself():
    chat = json.dumps([{"role": "system", "content": "s"}, USER, {"role": "user", "content": "long one"}])
    with pytest.raises(InvalidRequest, match=r"with the system messages it has 12 tokens.*leaves 9"):
        prompt(max_model_len=10, messages=chat, truncate="oldest")
    with pytest.raises(InvalidRequest, match="the last turn of the chat must fit"):
        prompt("long one", 5, chat=True, truncate="oldest")


def test_the_release_tells_how_long_a_prompt_may_be_or_is_refused(tmp_path):
    assert read_max_model_len(tmp_path) is None
    (tmp_path / LIMITS_FILE).write_text('{"max_model_len": 2048}')
    assert read_max_model_len(tmp_path) == 2048
    for wrong in ("", "[]", "{}", '{"max_model_len": 1}', '{"max_model_len": true}', '{"max_model_len": 9, "x": 1}'):
        (tmp_path / LIMITS_FILE).write_text(wrong)
        with pytest.raises(ReleaseMismatch, match=LIMITS_FILE):
            read_max_model_len(tmp_path)

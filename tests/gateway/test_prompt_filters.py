"""What a prompt filter looks at. Wrong if a text reached the model that no filter was shown, alone or beside others."""

import asyncio
import json
import re

import pytest

from tests.gateway.test_requests import chat
from tritonforge.gateway.api.errors import ApiError
from tritonforge.gateway.config import Tenant
from tritonforge.gateway.filtering.config import read_filters
from tritonforge.gateway.filtering.filters import FilterHook
from tritonforge.gateway.filtering.prompts import _Time
from tritonforge.gateway.filtering.scanner import Pattern, Scanner


class Across:
    """A classifier for a test: finds two words with nothing but marks between them."""

    async def score(self, text):
        return float(re.search(r"mix\W+bleach", text) is not None)


SPLIT = {
    "messages": [{"role": "user", "content": "mix the"}, {"role": "user", "content": "bleach now"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": one} for one in ("mix the", "bleach now")]}],
    "turns": [
        {"role": "user", "content": "mix the"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "bleach now"},
    ],
}


def prompt_of(messages, filters, **fields):
    """What a filter stage makes of a chat, and its notes; None: it refused it."""
    noted = []
    hook = FilterHook(read_filters({"filters": filters}))
    try:
        work = asyncio.run(hook.on_work(chat(messages=messages, **fields), Tenant("open"), noted.append))
    except ApiError as error:
        assert (error.status, error.code) == (400, "content_filter")
        return None, noted
    return json.loads(work.prompts[0].options["messages"]), noted


@pytest.mark.parametrize("name", ["messages", "parts"])
@pytest.mark.parametrize("action", ["block", "redact", "record"])
def test_what_is_split_over_a_chat_is_read_as_one(name, action):
    """A redacting filter refuses it: it cannot say which half to replace."""
    left, noted = prompt_of(SPLIT[name], {"x": {"patterns": [r"mix the\s{1,9}bleach"], "action": action}})
    assert (left is not None) == (action == "record") and noted == [f"prompt:x:{action}"]


def test_what_is_split_over_turns_with_a_tools_result_is_found_where_nothing_else_was_said_between():
    assert prompt_of(SPLIT["turns"], {"x": {"patterns": [r"mix the\s{1,3}\{\}\s{1,3}bleach"]}})[0] is None


def test_a_classifier_is_asked_about_the_whole_chat():
    across = {"x": {"classifier": f"{__name__}:Across"}}
    assert prompt_of([{"role": "user", "content": one} for one in ("mix", "bleach")], across)[0] is None
    assert prompt_of([{"role": "user", "content": one} for one in ("mix", "flour")], across)[0] is not None


def test_messages_that_match_nothing_together_are_left_alone():
    left, noted = prompt_of(SPLIT["messages"], {"x": {"patterns": ["mix", "now"], "action": "redact"}})
    assert [one["content"] for one in left] == ["[removed] the", "bleach [removed]"] and noted[0] == "prompt:x:redact"


@pytest.mark.parametrize(
    "function",
    [
        {"name": "f", "description": "how to mix bleach"},
        {"name": "f", "parameters": {"type": "object", "properties": {"mix bleach": {"type": "string"}}}},
        {"name": "f", "parameters": {"type": "object", "properties": {"id": {"id": "mix bleach"}}}},
        {"name": "f", "parameters": {"type": "object", "mix bleach": 1}},
        {"name": "f", "parameters": {"type": ["mix bleach"]}},
    ],
)
@pytest.mark.parametrize("action", ["block", "redact"])
def test_whatever_a_tool_says_to_the_model_is_looked_at(function, action):
    told = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", "function": function}]}
    assert prompt_of(filters={"x": {"patterns": ["mix bleach"], "action": action}}, **told)[0] is None


def test_what_the_api_itself_says_matches_nothing():
    words = ["user", "assistant", "function", "object", "string", "properties", "call_1"]
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    calls = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    left, noted = prompt_of(messages, {"x": {"patterns": words}}, tools=tools)
    assert left is not None and noted == []


class Counted:
    """A pattern that counts how often it was looked for."""

    def __init__(self, text):
        self.inner, self.looked = Pattern(text), 0

    def find(self, text, start):
        self.looked += 1
        return self.inner.find(text, start)

    def undecided(self, text, start):
        return self.inner.undecided(text, start)


def test_a_text_full_of_matches_is_not_searched_again_for_what_is_not_in_it():
    """Wrong: a prompt that repeats one match would hold up the gateway for a time that grows with its square."""
    often, never = Counted("ab"), Counted("zz")
    found = list(Scanner([often, never]).push("ab " * 500, final=True))
    assert sum(piece.pattern == 0 for piece in found) == 500
    assert often.looked == 501 and never.looked == 1


def test_others_are_answered_while_a_long_prompt_is_looked_at():
    async def run():
        turns, done = 0, asyncio.Event()

        async def other():
            nonlocal turns
            while not done.is_set():
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        hook = FilterHook(read_filters({"filters": {"x": {"patterns": ["secret"], "action": "redact"}}}))
        work = chat(messages=[{"role": "user", "content": "a secret " * 20_000}])
        left = await hook.on_work(work, Tenant("open"), lambda note: None)
        done.set()
        await task
        return turns, json.loads(left.prompts[0].options["messages"])[0]["content"]

    turns, left = asyncio.run(run())
    assert turns > 10 and left == "a [removed] " * 20_000


def test_a_request_whose_time_for_filters_is_over_is_refused_and_said_why():
    with pytest.raises(ApiError) as told:
        asyncio.run(_Time(left_s=0.0).redact(read_filters({}), "some text", lambda note: None))
    assert (told.value.status, told.value.code) == (400, "content_filter")

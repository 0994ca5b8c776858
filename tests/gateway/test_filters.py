"""Filters and formats. Wrong if anything that a filter blocks or redacts left in some piece of a stream, if a text were
changed otherwise than the whole text would be, or if text that nothing matches were held back for long.
"""

import asyncio
import json
import re

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.serving import serve_gateway
from tests.gateway.stand_ins import tritons
from tests.gateway.test_routing import CHAT, HELLO, ask, told
from tritonforge.errors import InvalidRequest
from tritonforge.gateway.answers import Gain, Scored
from tritonforge.gateway.api.formats import Newlines, Strip
from tritonforge.gateway.config import GatewayConfig
from tritonforge.gateway.filtering.config import BUILTIN, Filter, luhn
from tritonforge.gateway.filtering.filters import Answer
from tritonforge.gateway.filtering.scanner import Pattern, Scanner
from tritonforge.structured.tool_calls import ToolCall

PATTERNS = ("abc", "a{2,4}b?", r"\bcab\b", "(?:ab|abcb)c", "b(?=c)", "c[ab]{1,3}c", "(?<=b)a", "ca|cab")


def redact(patterns, pieces):
    """What a scanner makes of the pieces, with each match as <its pattern>."""
    scanner = Scanner([Pattern(one) for one in patterns])
    out = ""
    for place, piece in enumerate(pieces):
        for found in scanner.push(piece, final=place == len(pieces) - 1):
            out += found.text if found.pattern is None else f"<{found.pattern}>"
    return out


@given(
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True),
    st.lists(st.text("abc ", max_size=5), min_size=1, max_size=12),
)
def test_a_text_in_pieces_is_changed_as_the_whole_text_is(patterns, pieces):
    assert redact(patterns, pieces) == redact(patterns, ["".join(pieces)])


@given(st.text("abc ", max_size=40), st.sampled_from(("abc", "a{2,4}b?", "c[ab]{1,3}c")))
def test_one_pattern_replaces_what_pythons_re_does(text, pattern):
    assert redact([pattern], list(text) or [""]) == re.sub(pattern, "<0>", text)


@given(st.lists(st.text("abc ", max_size=4), min_size=1, max_size=12))
def test_a_matching_text_never_leaves_in_any_piece(pieces):
    scanner = Scanner([Pattern("abc"), Pattern("ca{1,3}b")])
    plain = "".join(
        found.text if found.pattern is None else "|"
        for place, piece in enumerate(pieces)
        for found in scanner.push(piece, final=place == len(pieces) - 1)
    )
    assert not re.search("abc|ca{1,3}b", plain)


def test_text_that_can_begin_no_match_is_passed_on_at_once():
    scanner = Scanner([Pattern("secret"), *BUILTIN["credentials"]])
    for word in ("Once ", "upon ", "a ", "time, ", "there ", "was "):
        assert "".join(one.text for one in scanner.push(word, final=False)) == word
    assert "".join(one.text for one in scanner.push("a sec", final=False)) == "a "
    assert "".join(one.text for one in scanner.push("ond", final=False)) == "second"


@pytest.mark.parametrize("pattern", ["a+", "(", ".*x", "(?:ab){1,3000}"])
def test_a_pattern_that_could_hold_back_without_end_is_refused(pattern):
    with pytest.raises(InvalidRequest, match="pattern"):
        Pattern(pattern)


SECRETS = [
    "AKIAIOSFODNN7EXAMPLE",
    "sk-tf-0123456789ab-abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQ",
    "ghp_" + "a1" * 18,
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\nabc=\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_builtin_credentials_are_found_character_by_character(secret):
    scanner = Scanner(BUILTIN["credentials"])
    text = f"it is {secret} indeed"
    pieces = [one for letter in text for one in scanner.push(letter, final=False)]
    pieces += scanner.push("", final=True)
    assert "".join(one.text for one in pieces if one.pattern is None) == "it is  indeed"


def test_cards_are_numbers_with_the_right_check_digit():
    assert luhn("4111 1111 1111 1111") and not luhn("4111 1111 1111 1112") and not luhn("0000000000000000")
    (pattern,) = BUILTIN["cards"]
    text = "pay 4111 1111 1111 1111 for order 4111111111111112"
    start, end = pattern.find(text, 0)
    assert text[start:end] == "4111 1111 1111 1111" and pattern.find(text, end) is None


def push_all(filters, gains):
    """The gains that leave, and what was noted."""
    noted = []
    answer = Answer(filters, noted.append)

    async def push():
        return [await answer.push(gain) for gain in gains]

    return asyncio.run(push()), noted


def gains_of(texts, reason="stop"):
    last = len(texts) - 1
    return [
        Gain(0, text, (place,), finish_reason=reason if place == last else None) for place, text in enumerate(texts)
    ]


BLOCK = Filter("words", patterns=("(?i)forbidden",), action="block")


def test_a_blocked_answer_ends_before_the_match_and_says_why():
    left, noted = push_all([BLOCK], gains_of(["this is for", "bid", "den and more", " text"])[:3])
    assert "".join(gain.text for gain in left) == "this is " and left[-1].finish_reason == "content_filter"
    assert noted == ["answer:words:block"]


def test_log_probabilities_of_what_was_redacted_are_not_told_and_others_only_at_the_end():
    redacting = Filter("words", patterns=("forbidden",), action="redact")
    for texts, kept in ((["a for", "bidden b"], 0), (["a for", "mer b"], 2)):
        gains = [
            Gain(0, text, (1,), (Scored(1, -0.5),), finish_reason="stop" if i else None) for i, text in enumerate(texts)
        ]
        left, _ = push_all([redacting], gains)
        assert [len(gain.scored) for gain in left] == [0, kept]


def test_arguments_of_tool_calls_are_filtered_too():
    call = ToolCall("call_1", "write", '{"text": "forbidden"}')
    end = Gain(0, "", (1,), finish_reason="stop", calls=(call,))
    left, _ = push_all([BLOCK], [end])
    assert left[0].calls == () and left[0].finish_reason == "content_filter"
    left, _ = push_all([Filter("words", patterns=("forbidden",), action="redact")], [end])
    assert json.loads(left[0].calls[0].arguments) == {"text": "[removed]"}


class Shouting:
    """A classifier for a test: the share of capital letters."""

    async def score(self, text):
        letters = [one for one in text if one.isalpha()]
        return sum(one.isupper() for one in letters) / max(1, len(letters))


def test_a_classifier_sees_sentences_before_the_client_does():
    judged = Filter("shouting", classifier=f"{__name__}:Shouting", threshold=0.6, window=60)
    assert judged.judge is not None
    left, noted = push_all([judged], gains_of(["All is ", "well. ", "NOW I AM ", "SHOUTING VERY LOUDLY AT YOU"]))
    assert [gain.text for gain in left] == ["", "All is well. ", "", ""]
    assert left[-1].finish_reason == "content_filter" and noted == ["answer:shouting:block"]


def test_a_classifier_sees_the_arguments_of_tool_calls():
    """Wrong: what may not be said could be said in a call."""
    judged = Filter("shouting", classifier=f"{__name__}:Shouting", threshold=0.6, window=60)
    call = ToolCall("call_1", "write", '{"TEXT": "NOW I AM SHOUTING"}')
    left, noted = push_all([judged], [Gain(0, "", (1,), finish_reason="stop", calls=(call,))])
    assert left[0].calls == () and left[0].finish_reason == "content_filter"
    assert noted == ["answer:shouting:block"]


def test_after_a_sentence_that_a_classifier_replaced_the_next_one_passes():
    """Wrong: what was taken out would condemn what follows it."""
    judged = Filter("shouting", classifier=f"{__name__}:Shouting", threshold=0.6, window=60, action="redact")
    left, _ = push_all([judged], gains_of(["NOW I AM SHOUTING. ", "this is said quietly. ", "and this too."]))
    assert [gain.text for gain in left] == ["[removed]", "this is said quietly. ", "and this too."]


class Across:
    """A classifier for a test: finds two words although a sentence ends between them."""

    async def score(self, text):
        return float(re.search(r"mix\W+bleach", text) is not None)


def test_a_classifier_sees_across_the_end_of_a_sentence():
    judged = Filter("across", classifier=f"{__name__}:Across")
    left, noted = push_all([judged], gains_of(["First, mix. ", "bleach. "]))
    assert "".join(gain.text for gain in left) == "First, mix. "
    assert noted == ["answer:across:block"] and "content_filter" in [gain.finish_reason for gain in left]


def test_log_probabilities_of_an_echoed_prompt_wait_for_its_text():
    redacting = Filter("words", patterns=("forbidden",), action="redact")
    prompt = (Scored(7, None), Scored(8, -0.1))
    for text, kept in (("a forbidden", 0), ("an allowed", 2)):
        gains = [Gain(0, text, (), prompt=prompt), Gain(0, " b", (1,), finish_reason="stop")]
        left, _ = push_all([redacting], gains)
        assert [len(gain.prompt) for gain in left] == [0, kept]


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({}, "one of patterns"),
        ({"patterns": ["a"], "builtin": "cards"}, "one of patterns"),
        ({"builtin": "nothing"}, "nothing"),
        ({"patterns": ["a"], "action": "shout"}, "shout"),
        ({"patterns": ["a"], "on": ["thoughts"]}, "thoughts"),
        ({"classifier": "no.such:thing"}, "no.such"),
        ({"patterns": ["a"], "colour": 1}, "colour"),
        ({"patterns": "a"}, "list"),
    ],
)
def test_a_filter_that_breaks_a_rule_is_refused(table, named):
    with pytest.raises(InvalidRequest, match=named):
        GatewayConfig.of_tables({"filters": {"x": table}})


def edge_with(filters, tmp_path, a, tables=None):
    content = {"models": {"m": {"replicas": [a.url]}}, "filters": filters} | (tables or {})
    return serve_gateway(None, None, tmp_path, content, ("open", "acme"))


def test_a_blocked_prompt_reaches_no_model_and_a_blocked_answer_ends_its_stream(tmp_path):
    """The stand-in writes a0 a1 a2 ..."""
    filters = {
        "asked": {"patterns": ["bomb"], "on": ["prompt"]},
        "written": {"patterns": ["a2 a3"], "on": ["answer"], "tenants": ["open"]},
    }
    with tritons("a") as (a,), edge_with(filters, tmp_path, a) as gateway:
        refused = ask(gateway, "m", messages=[{"role": "user", "content": [{"type": "text", "text": "a bomb"}]}])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "content_filter")
        assert a.began == []
        answer = ask(gateway, "m")
        text, last = told(answer)
        assert text == "a0 a1 " and last["choices"][0]["finish_reason"] == "content_filter"
        # Ids are random letters and digits: a token stands behind a quote or a space.
        assert '"a3' not in answer.text and " a3" not in answer.text and answer.text.count("[DONE]") == 1
        assert told(ask(gateway, "m", "acme"))[0] == "a0 a1 a2 a3 a4 a5 "
        first, second, third = gateway.await_records(3)
        assert first.filtered == ("prompt:asked:block",) and first.outcome == "refused"
        assert second.filtered == ("answer:written:block",) and second.finish_reasons == ("content_filter",)
        assert third.filtered == ()


def test_a_redacted_prompt_is_what_the_model_and_the_audit_get(tmp_path):
    filters = {"names": {"patterns": ["Alice"], "action": "redact", "replacement": "somebody"}}
    tables = {"tenants": {"open": {"audit_content": True}}}
    with tritons("a") as (a,), edge_with(filters, tmp_path, a, tables) as gateway:
        ask(gateway, "m", messages=[{"role": "user", "content": "I am Alice"}])
        (record,) = gateway.await_records(1)
        assert "Alice" not in record.content.prompts[0] and "somebody" in record.content.prompts[0]
        body = {"model": "m", "prompt": [[1, 2, 3]], "max_tokens": 1}
        ids = httpx2.post(f"{gateway.url}/v1/completions", json=body, headers=gateway.bearer(), trust_env=False)
        assert ids.status_code == 400 and "token ids" in ids.json()["error"]["message"]


def test_without_a_configuration_credentials_are_recorded_and_nothing_is_changed(tmp_path):
    with tritons("a") as (a,):
        tables = {"models": {"m": {"replicas": [a.url]}}}
        with serve_gateway(None, None, tmp_path, tables) as gateway:
            answer = ask(gateway, "m", messages=[{"role": "user", "content": f"my key is {SECRETS[0]}"}])
            assert told(answer)[0] == "a0 a1 a2 a3 a4 a5 "
            (record,) = gateway.await_records(1)
            assert record.filtered == ("prompt:credentials:record",)


@given(st.lists(st.text(" \nab", max_size=4), min_size=1, max_size=8))
def test_formats_change_a_text_in_pieces_as_the_whole(pieces):
    for make in (Strip, Newlines):
        one, whole = make(), make()
        last = len(pieces) - 1
        streamed = "".join(one.push(piece, final=place == last) for place, piece in enumerate(pieces))
        assert streamed == whole.push("".join(pieces), final=True)


def test_an_alias_formats_its_answers(tmp_path):
    tables = {"aliases": {"neat": {"models": "m", "formats": ["strip"]}}}
    with tritons("a") as (a,), edge_with({}, tmp_path, a, tables) as gateway:
        assert told(ask(gateway, "neat"))[0] == "a0 a1 a2 a3 a4 a5"
        whole = httpx2.post(
            gateway.url + CHAT,
            json=HELLO | {"model": "neat", "stream": False},
            headers=gateway.bearer(),
            trust_env=False,
        ).json()
        assert whole["choices"][0]["message"]["content"] == "a0 a1 a2 a3 a4 a5"

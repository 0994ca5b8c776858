"""What the decoder says as OpenAI's API says it, without a server. Wrong if a token or score were another answer's."""

import asyncio
import contextlib
import json

import pytest

from tests.gateway.test_requests import chat, completion
from tritonforge.client import Chunk
from tritonforge.gateway.answers import Gain, Scored, chat_logprobs, completion_logprobs, gains_of
from tritonforge.gateway.api.chat import ChatReply
from tritonforge.gateway.api.completions import CompletionReply
from tritonforge.gateway.api.replies import Usage
from tritonforge.gateway.merge import merge
from tritonforge.gateway.responses import ABORT, Sender, SlowClient, encode
from tritonforge.gateway.routing.router import ModelInfo

USAGE = Usage(3, 4, 0)


class Texts:
    """Token 0 is a letter, 1 and 2 are the halves of a two-byte character."""

    def bytes_of(self, token_id):
        return (b"a", b"\xc3", b"\xa9", b"bc")[token_id]


INFO = ModelInfo("m", fingerprint="fp_1", tokens=Texts())


def chunk_of(**outputs):
    return Chunk(outputs["text_output"][0], outputs["token_ids"], outputs=outputs)


def test_tokens_and_scores_go_to_the_answer_that_they_belong_to():
    chunk = chunk_of(
        text_output=("x", "yz"),
        token_ids=(5, 6, 7),
        token_counts=(1, 2),
        index=(2, 0),
        finish_reason=("", "stop"),
        logprobs=(-1.0, -2.0, -3.0),
        top_ids=(5, 1, 6, 2, 7, 3),
        top_logprobs=(-1.0, -1.5, -2.0, -2.5, -3.0, -3.5),
    )
    assert list(gains_of(chunk)) == [
        Gain(2, "x", (5,), (Scored(5, -1.0, ((5, -1.0), (1, -1.5))),)),
        Gain(
            0,
            "yz",
            (6, 7),
            (Scored(6, -2.0, ((6, -2.0), (2, -2.5))), Scored(7, -3.0, ((7, -3.0), (3, -3.5)))),
            finish_reason="stop",
        ),
    ]


def test_an_echoed_prompts_first_token_has_no_score():
    chunk = chunk_of(
        text_output=("ab",),
        token_ids=(3,),
        logprobs=(-1.0,),
        prompt_token_ids=(0, 3),
        prompt_logprobs=(-4.0,),
        prompt_top_ids=(1,),
        prompt_top_logprobs=(-0.5,),
    )
    (gain,) = gains_of(chunk)
    assert gain.prompt == (Scored(0, None), Scored(3, -4.0, ((1, -0.5),)))


def test_half_a_character_is_told_by_its_bytes():
    scored = (Scored(0, -1.0), Scored(1, -2.0), Scored(2, -3.0))
    assert [one["bytes"] for one in chat_logprobs(scored, Texts())] == [[97], [195], [169]]
    told, offset = completion_logprobs(scored, Texts(), 10)
    assert told["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert told["text_offset"] == [10, 11, 11] and offset == 12


def replay(reply_of, gains):
    """The chunks of a stream and the body of a whole answer to the same gains."""
    stream, whole = reply_of(), reply_of()
    chunks = [chunk for gain in gains for chunk in stream.chunks([gain])]
    whole.push(gains)
    return chunks, whole.body(USAGE)


def test_a_chats_stream_and_its_whole_answer_say_the_same():
    gains = [Gain(0, "Hel", (1,)), Gain(1, "", (2,)), Gain(0, "lo", (3,), finish_reason="stop")]
    gains.append(Gain(1, "Yes", (4,), finish_reason="length"))
    chunks, body = replay(lambda: ChatReply(chat(n=2, stream=True), INFO, "id", 1), gains)
    for index, choice in enumerate(body["choices"]):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"].get("content", "") for one in own) == choice["message"]["content"]
        assert [one["finish_reason"] for one in own][-1] == choice["finish_reason"]
        assert [one["finish_reason"] for one in own][:-1] == [None] * (len(own) - 1)
    assert (body["object"], chunks[0]["object"]) == ("chat.completion", "chat.completion.chunk")
    assert body["usage"]["total_tokens"] == 7 and "usage" not in chunks[0]


def test_a_completions_stream_and_its_whole_answer_say_the_same():
    gains = [Gain(0, "a", (0,), (Scored(0, -1.0),)), Gain(0, "", (1,), (Scored(1, -2.0),))]
    gains.append(Gain(0, "é", (2,), (Scored(2, -3.0),), finish_reason="stop"))
    chunks, body = replay(lambda: CompletionReply(completion(logprobs=0), INFO, "id", 1), gains)
    (choice,) = body["choices"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"] == "aé"
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [one for told in streamed for one in told[name]] == choice["logprobs"][name]


def test_events_are_one_line_each_whatever_the_text():
    told = encode({"text": "a\nb\r\n\u2028\u0085 é"})
    assert b"\n" not in told and b"\r" not in told
    assert json.loads(told)["text"] == "a\nb\r\n\u2028\u0085 é"


def test_a_client_that_takes_nothing_is_cut_off():
    aborted = []

    async def send(message):
        await asyncio.Event().wait()

    async def run():
        await Sender({"extensions": {ABORT: lambda: aborted.append(True)}}, send, 0.01).begin_stream({})

    with pytest.raises(SlowClient):
        asyncio.run(run())
    assert aborted == [True]


def test_merged_answers_keep_their_order_and_one_failure_ends_all():
    ended = []

    async def source(name, count, fail=False):
        try:
            for index in range(count):
                yield name, index
                await asyncio.sleep(0)
            if fail:
                raise ValueError(name)
        finally:
            ended.append(name)

    async def run(*sources):
        return [item async for item in merge(sources)]

    items = asyncio.run(run(source("a", 5), source("b", 3)))
    assert [item for item in items if item[0] == "a"] == [("a", index) for index in range(5)]
    assert len(items) == 8
    with pytest.raises(ValueError, match="c"):
        asyncio.run(run(source("c", 1, fail=True), source("d", 10**6)))
    assert set(ended) == {"a", "b", "c", "d"}


def test_merged_sources_are_closed_with_their_consumer():
    """Wrong: the answers of a client that left would be read on while they are ended."""
    ended = []

    async def source(name):
        try:
            while True:
                yield name
                await asyncio.sleep(0)
        finally:
            ended.append(name)

    async def run(*sources):
        async with contextlib.aclosing(merge(sources)) as merged:
            await anext(merged)
        return list(ended)

    assert sorted(asyncio.run(run(source("a"), source("b")))) == ["a", "b"]
    ended.clear()
    assert asyncio.run(run(source("a"))) == ["a"]


def test_a_source_that_is_cancelled_from_within_ends_what_is_merged():
    """Wrong: gRPC ends a call that its channel loses so, and the client would wait for ever."""

    async def cancelled():
        raise asyncio.CancelledError
        yield

    async def endless():
        yield "one"
        await asyncio.Event().wait()

    async def run():
        async with asyncio.timeout(30):
            return [item async for item in merge([endless(), cancelled()])]

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())

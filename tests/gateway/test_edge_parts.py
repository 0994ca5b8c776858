"""Parts of the edge without a server: bodies, headers, the ends of answers. Each test says what would be wrong."""

import asyncio
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tritonforge.gateway.answers import Gain
from tritonforge.gateway.api.bodies import read
from tritonforge.gateway.api.errors import ApiError
from tritonforge.gateway.api.schemas import CompletionRequest
from tritonforge.gateway.command import listen
from tritonforge.gateway.progress import CONTENT_FILTER, Progress
from tritonforge.gateway.responses import Sender


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"model": "m", "prompt": %s}' % (b"1" * 5000), "a number in it is too large"),
        (b'{"model": "m", "temperature": 1e999}', "a number in it is too large"),
        (b'{"model": "m", "temperature": NaN}', "NaN is no JSON"),
        (b'{"model": "\xff"}', "its text is not valid UTF-8"),
        (b'{"model": "\\ud800"}', "its text is not valid UTF-8"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"model": ', "Expecting value: line 1 column 11 (char 10)"),
    ],
)
def test_a_body_that_is_no_json_is_refused_in_words_that_tell_nothing_of_the_interpreter(body, why):
    with pytest.raises(ApiError) as told:
        read(CompletionRequest, body)
    assert (told.value.code, told.value.message) == ("invalid_json", f"The body must be JSON: {why}")


def test_an_error_is_short_however_long_the_key_is_that_it_names():
    with pytest.raises(ApiError) as told:
        read(CompletionRequest, b'{"model": "m", "prompt": "x", "%s": 1}' % (b"k" * 100_000))
    assert told.value.code == "unknown_parameter" and len(str(told.value.body())) < 1000


def test_a_header_takes_whatever_name_a_model_has():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(Sender({}, send, 60).begin_stream({"x-tritonforge-served-by": "modèle \u2603"}))
    assert (b"x-tritonforge-served-by", "modèle ?".encode("latin-1")) in sent[0]["headers"]


def test_a_run_ends_once_all_its_answers_have_also_when_a_filter_ended_the_first_of_them():
    """Wrong: the client would wait while the model writes on an answer that is over."""

    class EndsTheFirst:
        async def push(self, gain):
            return replace(gain, finish_reason=CONTENT_FILTER) if gain.index == 2 else gain

    async def ended(*gains):
        progress, run = Progress(), SimpleNamespace(offset=2, complete=False)
        progress.begin([EndsTheFirst()], 2, keep=False)
        for gain in gains:
            await progress.see(run, gain)
        return run.complete

    first, more, stop = Gain(2, "a", (1,)), Gain(3, "b", (1,)), Gain(3, "", (2,), finish_reason="stop")
    assert not asyncio.run(ended(first, more))
    assert asyncio.run(ended(first, more, stop)) and asyncio.run(ended(stop, first))
    assert not asyncio.run(ended(more, stop))


def test_a_connection_sends_each_piece_of_an_answer_at_once():
    """Wrong: the first text waits for the client to acknowledge the headers, 40 ms."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

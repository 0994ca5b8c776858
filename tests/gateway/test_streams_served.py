"""Server-sent events, byte by byte. Wrong if a client would see another text than the model wrote, or an end that is
none.
"""

import json
import socket

import pytest

from tests.gateway.serving import MODEL

pytestmark = pytest.mark.server

CHAT = "/v1/chat/completions"
MIXED = "naïve — 日本語 🎉👩‍🚀 ﷺ \u2028 end"
"""Characters of one to four bytes, most of them several tokens; one that some line readers take for a line break."""


def body_of(**fields):
    return {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0} | fields


def forced(text):
    """A response_format whose only answer is `text` as a JSON string."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": text}}}


def raw_request(gateway, body):
    content = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.keys['open']}\r\n"
        f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def read_slowly(gateway, body, size):
    """The whole response of a client that reads `size` bytes at a time."""
    with socket.create_connection(gateway.address) as client:
        client.settimeout(60)
        client.sendall(raw_request(gateway, body))
        return b"".join(iter(lambda: client.recv(size), b""))


def dechunk(raw):
    """Headers and body of a chunked response."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body, rest = body + rest[:length], rest[length + 2 :]
        if not length:
            break
    headers = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
    return headers, body


def events_of(body):
    """The data of each event; nothing else may be in a stream."""
    events = body.split(b"\n\n")
    assert events[-1] == b"" and all(event.startswith(b"data: ") and b"\n" not in event for event in events[:-1])
    return [event[6:] for event in events[:-1]]


def text_of(events):
    """The joined text of a stream that ended well."""
    assert events[-1] == b"[DONE]" and events.count(b"[DONE]") == 1
    chunks = [json.loads(event) for event in events[:-1]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count(None) == len(chunks) - 1
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_split_characters_arrive_whole_and_byte_exact_at_a_client_that_reads_one_byte_at_a_time(gateway):
    body = body_of(response_format=forced(MIXED), stream=True, max_tokens=120)
    _, stream = dechunk(read_slowly(gateway, body, 1))
    events = events_of(stream)
    assert len(events) > 10
    assert json.loads(text_of(events)) == MIXED


@pytest.mark.parametrize("stop", [["upon"], [" a time", "zzz"], ["ce upo"], ["\n\n"]])
def test_a_stop_string_never_shows_in_a_stream_and_ends_it_like_the_whole_answer(gateway, http, stop):
    fields = {"prompt": "Once", "stop": stop, "max_tokens": 40, "temperature": 0, "model": MODEL}
    whole = http.post("/v1/completions", json=fields).json()["choices"][0]
    with http.stream("POST", "/v1/completions", json=fields | {"stream": True}) as answer:
        events = events_of(b"".join(answer.iter_bytes()))
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]
    assert not any(one in whole["text"] for one in stop)


def test_no_proxy_may_gather_or_change_a_stream(gateway):
    raw = read_slowly(gateway, body_of(stream=True, max_tokens=2), 65536)
    headers, _ = dechunk(raw)
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"cache-control"] == b"no-cache, no-transform"
    assert headers[b"transfer-encoding"] == b"chunked" and b"content-length" not in headers
    assert headers[b"x-request-id"].startswith(b"req_")


def test_n_streamed_answers_come_apart_by_their_index(gateway, http):
    fields = body_of(n=3, max_tokens=12, temperature=1, seed=5)
    whole = http.post(CHAT, json=fields).json()["choices"]
    with http.stream("POST", CHAT, json=fields | {"stream": True}) as answer:
        events = events_of(b"".join(answer.iter_bytes()))
    texts = {0: "", 1: "", 2: ""}
    for event in events[:-1]:
        (choice,) = json.loads(event)["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert list(texts.values()) == [one["message"]["content"] for one in whole]


def test_streamed_log_probabilities_are_those_of_the_whole_answer(gateway, http):
    fields = body_of(logprobs=True, top_logprobs=2, max_tokens=8)
    whole = http.post(CHAT, json=fields).json()["choices"][0]["logprobs"]["content"]
    with http.stream("POST", CHAT, json=fields | {"stream": True}) as answer:
        events = events_of(b"".join(answer.iter_bytes()))
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    told = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
    assert [one["bytes"] for one in told] == [one["bytes"] for one in whole]
    assert all(len(one["top_logprobs"]) == 2 for one in told)


def test_what_is_refused_before_the_first_token_has_a_status_and_no_stream(http):
    answer = http.post(CHAT, json=body_of(stream=True, logit_bias={"60000": 1}))
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/json")


def test_an_answer_that_fails_on_the_way_ends_with_an_error_event_and_is_not_done(gateway, http):
    """timeout_ms ends it after its first tokens, like any failure of the model."""
    fields = {"model": MODEL, "prompt": "Once", "stream": True, "ignore_eos": True, "max_tokens": 2000}
    with http.stream("POST", "/v1/completions", json=fields | {"timeout_ms": 1500}) as answer:
        events = events_of(b"".join(answer.iter_bytes()))
    assert json.loads(events[-1])["error"]["code"] == "timeout"
    assert b"[DONE]" not in events and len(events) > 2

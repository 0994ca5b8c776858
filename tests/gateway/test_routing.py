"""Replicas, fallbacks and breakers through the whole edge, in front of servers that fail on demand (stand_ins.py).

Wrong if a failure before the first token reached a client although somebody else could answer, if one after it were
hidden or answered a second time, or if a broken server kept getting requests.
"""

import asyncio
import contextlib
import json
import time

import httpx2
import pytest

from tests.gateway.serving import serve_gateway
from tests.gateway.stand_ins import TOKENS, managed_api, text_of, tritons
from tritonforge.gateway.routing.breaker import State

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello you"}], "stream": True}
QUICK = {"failures": 2, "open_s": 0.05, "health_s": 0.05}


@pytest.fixture
def edge_of(tmp_path):
    """edge_of(tables): a gateway in front of what [models] names."""

    def start(tables, tenants=("open",)):
        return serve_gateway(None, None, tmp_path, {"routing": QUICK} | tables, tenants)

    return start


def ask(gateway, model, tenant="open", headers=None, **fields):
    """Status, headers and body of one request."""
    body = HELLO | {"model": model} | fields
    sent = gateway.bearer(tenant) | (headers or {})
    return httpx2.post(gateway.url + CHAT, json=body, headers=sent, timeout=60, trust_env=False)


def events_of(body):
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]


def told(answer):
    """The joined text of a stream, and its last event."""
    events = events_of(answer.text)
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in events if one.get("choices"))
    return text, events[-1]


def replicas_of(*servers):
    return {"models": {"m": {"replicas": [one.url for one in servers]}}}


def test_a_dead_replica_is_never_seen_by_a_client(edge_of):
    with tritons("a", "b") as (a, b), edge_of(replicas_of(a, b)) as gateway:
        a.die()
        answers = [ask(gateway, "m") for _ in range(6)]
        assert [told(one)[0] for one in answers] == [text_of("b")] * 6
        assert all(one.text.count("[DONE]") == 1 for one in answers)
        records = gateway.await_records(6)
        assert {record.replica for record in records} == {b.url} and {record.outcome for record in records} == {"ok"}


@pytest.mark.parametrize("why", ["UNAVAILABLE: the queue is full, retry in about 3 s", "INTERNAL: the engine failed"])
def test_a_replica_that_refuses_is_left_for_another(edge_of, why):
    with tritons("a", "b") as (a, b), edge_of(replicas_of(a, b)) as gateway:
        a.refuse = why
        answers = [ask(gateway, "m") for _ in range(4)]
        assert [told(one)[0] for one in answers] == [text_of("b")] * 4
        assert len(a.began) >= 1 and len(b.began) == 4
        assert max(record.tries for record in gateway.await_records(4)) == 2


def test_what_a_model_refuses_for_its_own_sake_is_not_tried_elsewhere(edge_of):
    with tritons("a", "b") as (a, b), edge_of(replicas_of(a, b)) as gateway:
        a.refuse = b.refuse = "INVALID_ARGUMENT: temperature must be in [0, 2], got 9"
        answer = ask(gateway, "m")
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "temperature")
        assert len(a.began) + len(b.began) == 1


def test_a_replica_that_dies_after_the_first_token_ends_the_answer_with_an_error_and_nothing_twice(edge_of):
    with tritons("a") as (a,), tritons("b") as (b,), edge_of(replicas_of(a, b)) as gateway:
        a.hold_at = b.hold_at = 3
        with httpx2.stream(
            "POST",
            gateway.url + CHAT,
            json=HELLO | {"model": "m"},
            headers=gateway.bearer(),
            timeout=60,
            trust_env=False,
        ) as answer:
            pieces = answer.iter_text()
            seen = next(pieces)
            (first, second) = (a, b) if a.began else (b, a)
            assert first.held.acquire(timeout=60)
            first.die()
            seen += "".join(pieces)
        text = "".join(one["choices"][0]["delta"].get("content", "") for one in events_of(seen) if "choices" in one)
        assert text == text_of(first.name, 3)
        error = events_of(seen)[-1]["error"]
        assert error["code"] == "answer_broken_off" and "[DONE]" not in seen
        assert second.began == []
        (record,) = gateway.await_records(1)
        assert (record.outcome, record.error_code, record.tries) == ("failed", "answer_broken_off", 1)


def test_a_replica_killed_under_load_costs_only_the_answers_that_it_had_begun(edge_of):
    """Sixteen answers: half of them wait at a, without a token, when it dies, and are written by b."""
    with tritons("a", "b") as (a, b), edge_of(replicas_of(a, b)) as gateway:
        a.hold_at = b.hold_at = 0

        async def post(client):
            return await client.post(CHAT, json=HELLO | {"model": "m"})

        async def load():
            async with httpx2.AsyncClient(
                base_url=gateway.url, headers=gateway.bearer(), timeout=60, trust_env=False
            ) as client:
                tasks = [asyncio.create_task(post(client)) for _ in range(16)]
                for server in (a, b):
                    for _ in range(8):
                        assert await asyncio.to_thread(server.held.acquire, timeout=60)
                await asyncio.to_thread(a.die)
                for _ in range(8):
                    assert await asyncio.to_thread(b.held.acquire, timeout=60)
                b.go.set()
                return await asyncio.gather(*tasks)

        answers = asyncio.run(load())
        assert [told(one)[0] for one in answers] == [text_of("b")] * 16
        assert all(one.text.count("[DONE]") == 1 for one in answers)
        assert sorted(record.tries for record in gateway.await_records(16)) == [1] * 8 + [2] * 8


def test_with_all_replicas_down_a_client_is_told_at_once_and_when_to_come_back(edge_of):
    with tritons("a", "b") as (a, b), edge_of(replicas_of(a, b)) as gateway:
        a.die()
        b.die()
        for _ in range(5):
            answer = ask(gateway, "m")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert answer.headers["retry-after"]
        replicas = gateway.edge.router.models_by_name["m"].replicas
        # whichever noticed first: a replica that is known to be away is not asked, so its breaker learns no more
        assert all(replica.breaker.state is not State.CLOSED or not replica.healthy for replica in replicas)
        a.start()
        deadline = time.monotonic() + 60
        while ask(gateway, "m").status_code != 200:  # its breaker lets one try, then closes
            assert time.monotonic() < deadline
        assert next(one for one in replicas if one.name == a.url).breaker.state is State.CLOSED


FALLBACK = {"fallback": ["other", "cloud"], "models": "m"}


@contextlib.contextmanager
def with_fallback(edge_of, monkeypatch, **alias):
    """Servers m and other, a managed API, and a gateway whose alias `chat` falls back on them."""
    monkeypatch.setenv("STAND_IN_KEY", "sk-of-the-account")
    with tritons("m", "other") as (m, other), managed_api() as cloud:
        tables = {
            "models": {"m": {"replicas": [m.url]}, "other": {"replicas": [other.url]}},
            "managed": {"cloud": {"base_url": cloud.base_url, "model": "big-1", "key_env": "STAND_IN_KEY"}},
            "aliases": {"chat": FALLBACK | alias},
        }
        with edge_of(tables, ("open", "acme")) as gateway:
            yield gateway, m, other, cloud


def test_another_model_answers_and_then_a_managed_api_when_nobody_else_can(edge_of, monkeypatch):
    with with_fallback(edge_of, monkeypatch) as (gateway, m, other, cloud):
        assert told(ask(gateway, "chat"))[0] == text_of("m")
        m.die()
        second = ask(gateway, "chat")
        assert told(second)[0] == text_of("other") and second.headers["x-tritonforge-served-by"] == "other"
        other.die()
        third = ask(gateway, "chat", max_tokens=50, temperature=0.5, user="u", stream_options={"include_usage": True})
        events = events_of(third.text)
        text = "".join(one["choices"][0]["delta"].get("content", "") for one in events if one["choices"])
        assert text == text_of("managed") and third.text.count("[DONE]") == 1
        assert events[-1]["usage"]["completion_tokens"] == TOKENS and events[-1]["usage"]["prompt_tokens"] == 9
        ((path, headers, body),) = cloud.requests
        assert path == "/v1/chat/completions" and headers["authorization"] == "Bearer sk-of-the-account"
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("big-1", 50, 0.5)
        assert body["messages"] == HELLO["messages"] and "user" not in body
        trace = third.headers["traceparent"].split("-")[1]
        assert headers["traceparent"].split("-")[1] == trace
        served = [(record.served_model, record.fallback) for record in gateway.await_records(3)]
        assert served == [("m", ""), ("other", "unavailable"), ("cloud", "unavailable")]
        whole = ask(gateway, "chat", stream=False).json()
        assert whole["choices"][0]["message"]["content"] == text_of("managed")


def test_nothing_is_sent_to_a_managed_api_without_a_policy_that_says_so(edge_of, monkeypatch):
    with with_fallback(edge_of, monkeypatch, fallback=[]) as (gateway, m, _, cloud):
        m.die()
        assert ask(gateway, "chat").status_code == 503 and ask(gateway, "m").status_code == 503
        assert cloud.requests == []


def test_a_policy_without_unavailable_keeps_a_failure_where_it_is(edge_of, monkeypatch):
    with with_fallback(edge_of, monkeypatch, retry_on=["timeout"]) as (gateway, m, other, cloud):
        m.refuse = "UNAVAILABLE: the queue is full"
        assert ask(gateway, "chat").status_code == 503
        assert other.began == [] and cloud.requests == []


def test_what_a_managed_api_cannot_be_asked_is_not_sent_there_with_a_part_left_out(edge_of, monkeypatch):
    with with_fallback(edge_of, monkeypatch, fallback=["cloud"]) as (gateway, m, _, cloud):
        m.die()
        assert ask(gateway, "chat", top_k=3).status_code == 503
        assert cloud.requests == []


def test_an_error_of_the_managed_api_tells_nothing_of_its_account(edge_of, monkeypatch):
    with with_fallback(edge_of, monkeypatch, fallback=["cloud"]) as (gateway, m, _, cloud):
        m.die()
        cloud.status = 429
        answer = ask(gateway, "chat")
        assert answer.status_code == 503 and "42" not in answer.text


def test_a_managed_answer_that_breaks_off_is_told(edge_of, monkeypatch):
    with with_fallback(edge_of, monkeypatch, fallback=["cloud"]) as (gateway, m, _, cloud):
        m.die()
        cloud.break_off = True
        text, last = told(ask(gateway, "chat"))
        assert text == text_of("managed", TOKENS // 2) and last["error"]["code"] == "answer_broken_off"


def test_a_first_token_that_is_late_is_given_up_and_cancelled_before_another_is_asked(edge_of, monkeypatch):
    with with_fallback(edge_of, monkeypatch, first_token_s=1.5) as (gateway, m, _, _):
        m.hold_at = 0
        assert told(ask(gateway, "chat"))[0] == text_of("other")
        assert m.cancelled == m.began and len(m.began) == 1
        (record,) = gateway.await_records(1)
        assert (record.fallback, record.tries) == ("timeout", 2)


def test_the_deadline_of_an_alias_ends_a_request_and_is_told_to_the_model(edge_of, monkeypatch):
    with with_fallback(edge_of, monkeypatch, deadline_s=1.5) as (gateway, m, other, cloud):
        m.hold_at = 0
        answer = ask(gateway, "chat")
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert 1 <= m.options[0]["timeout_ms"] <= 1500
        assert other.began == [] and cloud.requests == []


def test_shares_and_pins_decide_between_models_and_a_request_keeps_its_side(edge_of):
    with tritons("old", "new") as (old, new):
        tables = {
            "models": {"old": {"replicas": [old.url]}, "new": {"replicas": [new.url]}},
            "aliases": {"chat": {"models": {"old": 0.75, "new": 0.25}, "pins": {"acme": "new"}}},
        }
        with edge_of(tables, ("open", "acme")) as gateway:
            for _ in range(40):
                assert ask(gateway, "chat").status_code == 200
            assert 1 <= len(new.began) <= 24 and len(old.began) + len(new.began) == 40
            before = len(old.began)
            for _ in range(5):
                assert told(ask(gateway, "chat", "acme"))[0] == text_of("new")
            assert len(old.began) == before
            listed = httpx2.get(f"{gateway.url}/v1/models", headers=gateway.bearer(), trust_env=False).json()
            assert {one["id"] for one in listed["data"]} == {"old", "new", "chat"}


def test_a_canary_release_gets_its_share_and_pinned_tenants_their_release(edge_of):
    with tritons("m") as (m,):
        m.parameters = {
            "llm": {"release_digest": "a" * 64, "release_version": "1000"},
            "llm_canary": {
                "release_digest": "b" * 64,
                "release_version": "999",
                "canary_share": '{"fraction": 0.5, "tenants": []}',
            },
        }
        tables = replicas_of(m) | {
            "aliases": {"chat": {"models": "m", "releases": {"acme": "canary", "old": "stable"}}}
        }
        with edge_of(tables, ("open", "acme", "old")) as gateway:
            replica = gateway.edge.router.models_by_name["m"].replicas[0]
            deadline = time.monotonic() + 60
            while replica.route is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            prints = {"open": set(), "acme": set(), "old": set()}
            for count in range(100):  # each has half a chance to be the canary's
                for tenant in prints if count < 8 else ("open",):
                    events = events_of(ask(gateway, "chat", tenant).text)
                    prints[tenant] |= {event["system_fingerprint"] for event in events}
                if count >= 8 and len(prints["open"]) == 2:
                    break
            stable, canary = f"fp_{'a' * 16}", f"fp_{'b' * 16}"
            assert prints == {"open": {stable, canary}, "acme": {canary}, "old": {stable}}
            assert {record.version for record in gateway.await_records(24)} == {"1000", "999"}


def test_a_prefix_goes_where_it_is_cached_and_elsewhere_when_that_is_busy(edge_of):
    story = " ".join(f"word{place}" for place in range(200))
    chat = {"messages": [{"role": "user", "content": story}]}
    with tritons("a", "b", "c") as servers, edge_of(replicas_of(*servers)) as gateway:
        for _ in range(6):
            assert ask(gateway, "m", **chat).status_code == 200
        assert sorted(len(one.began) for one in servers) == [0, 0, 6]
        for _ in range(6):
            assert ask(gateway, "m").status_code == 200  # too short for a block: they are spread
        assert max(len(one.began) for one in servers) == 8


def test_a_traceparent_goes_through_and_a_bad_one_begins_anew(edge_of):
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with tritons("a") as (a,), edge_of(replicas_of(a)) as gateway:
        answer = ask(gateway, "m", headers={"traceparent": parent, "x-request-id": "mine-1"})
        version, trace, span, flags = answer.headers["traceparent"].split("-")
        assert (version, trace, flags) == ("00", parent.split("-")[1], "01") and span != parent.split("-")[2]
        assert a.options[0]["traceparent"] == answer.headers["traceparent"]
        assert a.began[0].startswith(answer.headers["x-request-id"])
        ask(gateway, "m", headers={"traceparent": parent.upper() + "zz"})
        first, second = gateway.await_records(2)
        assert (first.trace_id, first.parent_id, first.client_request_id) == (trace, parent.split("-")[2], "mine-1")
        assert second.parent_id == "" and second.trace_id != trace


def test_a_request_that_says_so_gets_the_least_urgent_class(edge_of):
    with tritons("a") as (a,), edge_of(replicas_of(a)) as gateway:
        ask(gateway, "m")
        ask(gateway, "m", headers={"x-tritonforge-priority": "low"})
        assert a.options[0]["priority_class"] < a.options[1]["priority_class"]
        assert ask(gateway, "m", headers={"x-tritonforge-priority": "high"}).status_code == 400

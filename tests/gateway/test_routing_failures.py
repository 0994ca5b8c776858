"""What goes wrong between the gateway and the places it asks: servers that hang or come late, an API that is odd.

Wrong if a request waited longer than it may, if a release's tokens reached another release, if an odd answer were no
failure of who gave it, or if a secret or an account were told.
"""

import asyncio
import time

import pytest

from tests.gateway import test_routing
from tests.gateway.stand_ins import TOKENS, TritonStandIn, managed_api, text_of, tritons
from tests.gateway.test_routing import ask, replicas_of, told, with_fallback
from tritonforge.errors import SetupError, TritonForgeError
from tritonforge.gateway.routing import triton_backend
from tritonforge.gateway.routing.breaker import BreakerPolicy, State
from tritonforge.gateway.routing.config import ManagedTable
from tritonforge.gateway.routing.managed import ManagedModel
from tritonforge.gateway.routing.managed_chunks import ChunkReader
from tritonforge.gateway.routing.router import Caller

edge_of = test_routing.edge_of
RELEASES = {
    "llm": {"release_digest": "a" * 64, "release_version": "1000"},
    "llm_canary": {
        "release_digest": "b" * 64,
        "release_version": "999",
        "canary_share": '{"fraction": 0.0, "tenants": []}',
    },
}


@pytest.fixture
def hanging(monkeypatch):
    """A stand-in whose tokenizer does not answer until `go`, and one that does."""
    answer = TritonStandIn.ModelInfer

    def wait(self, request, context):
        if self.name == "m":
            self.held.release()
            while not self.go.wait(0.01) and context.is_active():
                pass
        return answer(self, request, context)

    monkeypatch.setattr(TritonStandIn, "ModelInfer", wait)  # a server takes its methods when it starts
    with tritons("m", "other") as (m, other):
        yield m, other


def test_the_deadline_of_an_alias_counts_the_tokenizers_time(edge_of, hanging):
    m, _ = hanging
    tables = replicas_of(m) | {"aliases": {"chat": {"models": "m", "deadline_s": 0.5}}}
    with edge_of(tables) as gateway:
        answer = ask(gateway, "chat")
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


def test_a_tokenizer_that_does_not_answer_is_a_failure_of_its_replica_and_another_is_asked(
    edge_of, hanging, monkeypatch
):
    m, other = hanging
    monkeypatch.setattr(triton_backend, "CALL_TIMEOUT_S", 0.5)
    with edge_of(replicas_of(m, other)) as gateway:
        model, caller = gateway.edge.router.models_by_name["m"], Caller("req_1", gateway.edge.config.defaults)
        for _ in range(4):  # they take turns
            assert len(gateway.call(model.tokenize("Hello you", {}, caller)).token_ids) == 2
        assert m.held.acquire(blocking=False)
        assert model.replicas[0].breaker.state is not State.CLOSED or model.replicas[0].breaker._failures


def test_a_crowd_of_full_replicas_leaves_the_fallback_its_try(edge_of):
    with tritons("a", "b", "c", "d") as servers:
        *full, free = servers
        tables = replicas_of(*full)
        tables["models"]["next"] = {"replicas": [free.url]}
        with edge_of(tables | {"aliases": {"chat": {"models": "m", "fallback": ["next"]}}}) as gateway:
            for server in full:
                server.refuse = "UNAVAILABLE: the queue is full"
            assert told(ask(gateway, "chat"))[0] == text_of("d")


def test_a_gateway_that_starts_before_its_server_keeps_tenants_at_their_release_from_the_first_answer(edge_of):
    """Its next look around is an hour away, so only the request itself can have asked for the releases."""
    with tritons("m") as (m,):
        m.parameters = RELEASES
        m.die()
        tables = replicas_of(m) | {"aliases": {"chat": {"models": "m", "releases": {"open": "canary"}}}}
        with edge_of(tables | {"routing": {"health_s": 3600.0, "open_s": 0.01}}) as gateway:
            replica = gateway.edge.router.models_by_name["m"].replicas[0]
            while replica._refused == 0:  # it has looked around once
                time.sleep(0.01)
            m.start()
            asked = 1
            while ask(gateway, "chat").status_code != 200:  # gRPC connects anew after a while
                asked += 1
            assert {record.version for record in gateway.await_records(asked) if record.status == 200} == {"999"}


def test_a_server_that_is_away_for_a_moment_keeps_its_releases_apart(edge_of):
    """Wrong: what the canary's tokenizer made would be answered by the stable release."""
    with tritons("m") as (m,):
        m.parameters = RELEASES
        with edge_of(replicas_of(m)) as gateway:
            replica = gateway.edge.router.models_by_name["m"].replicas[0]
            gateway.call(replica.look())
            assert replica.route is not None
            before = replica.route
            m.die()
            gateway.call(replica.look())
            assert replica.route == before and not (gateway.call(replica.look()) or replica.healthy)
            m.start()


def test_a_look_that_fails_in_an_unknown_way_does_not_end_the_watch(edge_of):
    with tritons("m") as (m,), edge_of(replicas_of(m)) as gateway:
        replica = gateway.edge.router.models_by_name["m"].replicas[0]
        look, looks = replica.look, []

        async def odd():
            looks.append(1)
            if len(looks) == 1:
                raise ValueError("no answer of a kind that is known")
            await look()

        replica.look = odd
        deadline = time.monotonic() + 60
        while len(looks) < 3:
            assert time.monotonic() < deadline


@pytest.mark.parametrize("status", [302, 400, 402, 408, 413, 422, 500])
def test_what_a_managed_api_says_in_a_refusal_reaches_no_client(edge_of, monkeypatch, status):
    with with_fallback(edge_of, monkeypatch, fallback=["cloud"]) as (gateway, m, _, cloud):
        m.die()
        cloud.status = status
        answer = ask(gateway, "chat")
        refused = status in (400, 413, 422)
        assert answer.status_code == (422 if refused else 500) and "account" not in answer.text
        (record,) = gateway.await_records(1)
        assert record.outcome == ("refused" if refused else "failed")


@pytest.mark.parametrize("key", ["sk-abc\n", "sk abc", "sk-\u20ac"])
def test_a_key_that_no_header_carries_is_refused_at_the_start_and_not_told(monkeypatch, key):
    """Wrong: HTTP's own error about it has the key, and goes to the log of each request."""
    monkeypatch.setenv("ODD_KEY", key)
    with pytest.raises(SetupError, match="ODD_KEY") as told_error:
        ManagedModel(ManagedTable("cloud", "http://127.0.0.1:1", "big", "ODD_KEY"), BreakerPolicy())
    assert "sk" not in str(told_error.value)


def test_more_requests_than_a_pool_of_connections_has_are_sent_to_a_managed_api(monkeypatch):
    """Wrong: those that wait for a connection would look late, and open the breaker of an API that is well."""

    async def pool():
        model = ManagedModel(ManagedTable("cloud", "http://127.0.0.1:1", "big"), BreakerPolicy())
        try:
            return model._client._transport._pool._max_connections
        finally:
            await model.close()

    assert asyncio.run(pool()) > 1_000_000


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"index": [1], "delta": {"content": "x"}}]},
        {"choices": [{"index": 0, "delta": {"content": 5}}]},
        {"choices": ["x"]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": "f"}]}}]},
        {"choices": 7},
    ],
)
def test_an_event_of_no_known_form_is_a_failure_of_the_api(event):
    with pytest.raises(TritonForgeError, match="not of OpenAI's form"):
        list(ChunkReader().push(event))


def test_events_with_empty_fields_are_read():
    reader = ChunkReader(7)
    assert list(reader.push({"choices": None, "usage": None})) == []
    assert list(reader.push({"choices": [{"index": None, "delta": None, "finish_reason": None}]})) == []
    assert [chunk.text for chunk in reader.push({"choices": [{"delta": {"content": "four"}, "finish_reason": "stop"}]})]
    assert reader.last().statistics == {"prompt_tokens": 7, "completion_tokens": 2, "cached_tokens": 0}


def test_an_answer_that_a_managed_api_does_not_count_is_charged_by_an_estimate(edge_of, monkeypatch):
    """Wrong: who leaves before the end, or an API that does not count, would cost its tenant nothing."""
    with with_fallback(edge_of, monkeypatch, fallback=["cloud"]) as (gateway, m, _, cloud):
        m.die()
        cloud.break_off = True
        ask(gateway, "chat")
        (record,) = gateway.await_records(1)
        size = len(text_of("managed", TOKENS // 2))
        assert (record.outcome, record.completion_tokens) == ("failed", -(-size // 3)) and record.prompt_tokens > 0


def test_nothing_is_charged_of_an_api_that_did_not_begin():
    async def cost():
        with managed_api() as cloud:
            cloud.status = 500
            model = ManagedModel(ManagedTable("cloud", cloud.base_url, "big"), BreakerPolicy())
            generation = _generation(model)
            with pytest.raises(TritonForgeError):
                await anext(generation.chunks())
            found = await generation.abandon()
            await model.close()
            return found

    assert asyncio.run(cost()) is None


def _generation(model):
    from tritonforge.gateway.routing.managed import ManagedGeneration

    return ManagedGeneration(model._client.build_request("POST", "chat/completions", json={}), model._client, 9)

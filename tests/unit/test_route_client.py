"""Requests that follow the route: read seldom, and never lost because a canary has just gone."""

import pytest

from tritonforge.client import Chunk, infer_request
from tritonforge.errors import EngineFailure, InvalidRequest, NotFound, Overloaded
from tritonforge.rollout import route_client
from tritonforge.rollout.route_client import Router
from tritonforge.rollout.routing import Route, Share, Target

ROUTE = Route(Target("llm", 1000, "a"), Target("llm_canary", 999, "b"), Share(1.0, ("acme",)))


@pytest.fixture
def server(monkeypatch):
    """What was asked of the server, and how often the route was read; `gone` fails calls of the canary."""

    class Server:
        reads = 0
        asked: list
        fail = None
        after = 0

    fake = Server()
    fake.asked = []

    def fetch(channel):
        fake.reads += 1
        return ROUTE

    def stream(channel, request, timeout):
        fake.asked.append((request.model_name, request.model_version))
        for number in range(2):
            if fake.fail is not None and request.model_name == "llm_canary" and number == fake.after:
                raise fake.fail
            yield Chunk(str(number), (number,))

    monkeypatch.setattr(route_client, "fetch_route", fetch)
    monkeypatch.setattr(route_client, "stream", stream)
    return fake


def ask(router: Router, **options) -> list[str]:
    return [chunk.text for chunk in router.stream(infer_request("llm", text="Hi", **options))]


def test_a_tenants_requests_go_to_its_release_and_others_do_not(server):
    router = Router(None)
    assert ask(router, tenant="acme") == ask(router, tenant="other") == ask(router) == ["0", "1"]
    assert server.asked == [("llm_canary", "999"), ("llm", ""), ("llm", "")]


def test_the_route_is_kept_for_a_moment_and_read_again_after_it(server):
    router = Router(None, refresh_s=60.0)
    assert ask(router) == ask(router) and server.reads == 1
    router = Router(None, refresh_s=0.0)
    assert ask(router) == ask(router) and server.reads == 3


@pytest.mark.parametrize("error", [NotFound("unknown model"), Overloaded("is not at ready state")])
def test_a_canary_that_is_gone_is_no_failure_of_the_request(server, error):
    server.fail = error
    assert ask(Router(None), tenant="acme") == ["0", "1"]
    assert server.asked == [("llm_canary", "999"), ("llm", "")]


def test_an_answer_that_has_begun_is_never_continued_by_another_release(server):
    server.fail, server.after = Overloaded("gone"), 1
    with pytest.raises(Overloaded):
        ask(Router(None), tenant="acme")
    assert server.asked == [("llm_canary", "999")]


def test_a_canary_that_fails_is_not_hidden(server):
    server.fail = EngineFailure("step failed")
    with pytest.raises(EngineFailure):
        ask(Router(None), tenant="acme")


def test_a_request_for_another_model_is_refused(server):
    with pytest.raises(InvalidRequest, match="only requests for llm are routed, got one for decoder"):
        Router(None).target(infer_request("decoder", input_ids=[1]))

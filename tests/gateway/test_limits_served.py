"""Identity and limits over HTTP. Wrong if a tenant got more than its limit, or felt another's, or what it did not use
were lost; or if a refusal had another status than the API promises.
"""

import asyncio
import socket

import httpx2
import pytest

from tests.gateway.serving import MODEL, serve_gateway
from tritonforge.gateway.limits.quota import Quota, open_storage

pytestmark = pytest.mark.server

NOW = 1_800_000_000.0
CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def post_all(gateway, bodies, tenant="open"):
    """The answers to all bodies, sent at once."""

    async def ask():
        limits = httpx2.Limits(max_connections=len(bodies))
        async with httpx2.AsyncClient(
            base_url=gateway.url, headers=gateway.bearer(tenant), timeout=120, limits=limits, trust_env=False
        ) as client:
            return await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))

    return asyncio.run(ask())


def post(gateway, body, tenant="open", path=CHAT, **options):
    options.setdefault("headers", gateway.bearer(tenant))
    return httpx2.post(gateway.url + path, json=body, timeout=60, trust_env=False, **options)


def test_of_200_requests_at_once_a_tenant_gets_its_100_and_another_all(gateway_of):
    tables = {"tenants": {"acme": {"requests_per_minute": 100}}}
    with gateway_of(tables, ("acme", "beta")) as gateway:
        answers = post_all(gateway, [HELLO] * 200, "acme")
        assert sorted(answer.status_code for answer in answers) == [200] * 100 + [429] * 100
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"]["type"] == "requests" and int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-ratelimit-limit-requests"] == "100"
        assert [answer.status_code for answer in post_all(gateway, [HELLO] * 4, "beta")] == [200] * 4


def test_a_token_budget_holds_with_answers_side_by_side_and_what_is_not_used_comes_back(gateway_of):
    limit = 1000
    with gateway_of({"tenants": {"acme": {"tokens_per_minute": limit}}}, ("acme",)) as gateway:
        gateway.edge.quota = Quota(open_storage("memory"), lambda: NOW)
        body = HELLO | {"max_tokens": 200, "temperature": 0, "stop": ["."]}
        answers = post_all(gateway, [body] * 12, "acme")
        done = [answer.json()["usage"] for answer in answers if answer.status_code == 200]
        assert {answer.status_code for answer in answers} == {200, 429} and done
        used = sum(usage["total_tokens"] for usage in done)
        assert used <= limit
        gateway.await_records(12)
        left = limit - used
        prompt = done[0]["prompt_tokens"]
        fits, too_much = HELLO | {"max_tokens": left - prompt}, HELLO | {"max_tokens": left - prompt + 1}
        refused = post(gateway, too_much, "acme")
        assert refused.status_code == 429 and refused.headers["x-ratelimit-remaining-tokens"] == str(left)
        assert post(gateway, fits | {"stop": ["."]}, "acme").status_code == 200


def test_no_more_streams_are_open_than_a_tenant_may_have(gateway_of):
    tables = {"tenants": {"acme": {"concurrent_requests": 2}}}
    with gateway_of(tables, ("acme", "beta")) as gateway:
        long = HELLO | {"max_tokens": 500, "stream": True, "ignore_eos": True}
        client = httpx2.Client(base_url=gateway.url, headers=gateway.bearer("acme"), timeout=60, trust_env=False)
        with client, client.stream("POST", CHAT, json=long) as one, client.stream("POST", CHAT, json=long) as other:
            assert (one.status_code, other.status_code) == (200, 200)
            refused = post(gateway, HELLO, "acme")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert post(gateway, HELLO, "beta").status_code == 200
            seen = len(gateway.await_records(2))
            other.close()
            gateway.await_records(seen + 1)
            assert post(gateway, HELLO, "acme").status_code == 200


def test_a_request_without_a_valid_key_is_told_what_is_missing(gateway):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": gateway.keys["open"]}):
        refused = post(gateway, HELLO, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", f"/v1/models/{MODEL}"):
        assert httpx2.get(gateway.url + path, trust_env=False).status_code == 401


def test_a_model_that_a_tenant_may_not_use_is_forbidden_and_not_listed(gateway_of):
    with gateway_of({"tenants": {"acme": {"models": ["another"]}}}, ("acme",)) as gateway:
        refused = post(gateway, HELLO, "acme")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
        listed = httpx2.get(f"{gateway.url}/v1/models", headers=gateway.bearer("acme"), trust_env=False)
        assert listed.json()["data"] == []
        assert post(gateway, HELLO | {"model": "another"}, "acme").status_code == 404


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(gateway_of):
    with gateway_of({"edge": {"max_body_bytes": 1000}}) as gateway:
        large = HELLO | {"user": "x" * 2000}
        assert post(gateway, large).status_code == 413
        sent = httpx2.post(
            gateway.url + CHAT, content=iter([b" " * 600, b" " * 600]), headers=gateway.bearer(), trust_env=False
        )
        assert (sent.status_code, sent.json()["error"]["code"]) == (413, "request_too_large")
        assert post(gateway, HELLO).status_code == 200


def test_a_body_that_does_not_arrive_is_not_waited_for(gateway_of):
    with gateway_of({"edge": {"body_timeout_s": 0.2}}) as gateway, socket.create_connection(gateway.address) as client:
        key = gateway.keys["open"]
        client.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 50\r\n\r\n".encode()
        )
        client.settimeout(30)
        assert client.recv(12) == b"HTTP/1.1 408"


def test_a_triton_that_is_away_is_503_with_a_time_to_come_back(release_dir, tmp_path, server):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        away = f"127.0.0.1:{unused.getsockname()[1]}"
        with serve_gateway(away, release_dir, tmp_path) as gateway:
            refused = post(gateway, HELLO)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert away not in refused.text
            ready = httpx2.get(f"{gateway.url}/health/ready", trust_env=False)
            assert ready.status_code == 503
            assert httpx2.get(f"{gateway.url}/health/live", trust_env=False).status_code == 200
            assert gateway.await_records(1)[0].outcome == "failed"


def test_a_prefix_is_shared_within_a_tenant_and_not_beyond_it(gateway_of):
    prompt = "Once upon a time there was a king who had three sons and a daughter. " * 6
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    with gateway_of({}, ("acme", "beta")) as gateway:

        def cached(tenant):
            answer = post(gateway, body, tenant, path="/v1/completions").json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("acme") == 0 and cached("acme") > 0
        assert cached("beta") == 0

"""The paths that answer at once, and those that do not exist. Wrong if an error had no id, or not OpenAI's form."""

import httpx2
import pytest

from tests.gateway.serving import serve_gateway
from tests.gateway.stand_ins import tritons

CHAT = "/v1/chat/completions"
EMBEDDINGS = {"model": "m", "input": "Hello"}


@pytest.fixture(scope="module")
def edge(tmp_path_factory):
    """An edge whose tenant `narrow` may use no model but `other`."""
    with tritons("a") as (a,):
        tables = {"models": {"m": {"replicas": [a.url]}}, "tenants": {"narrow": {"models": ["other"]}}}
        with serve_gateway(None, None, tmp_path_factory.mktemp("edge"), tables, ("open", "narrow")) as gateway:
            yield gateway


def ask(edge, method, path, tenant="open", **sent):
    headers = edge.bearer(tenant) if tenant else {}
    return httpx2.request(method, edge.url + path, headers=headers | sent.pop("headers", {}), trust_env=False, **sent)


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "code"),
    [
        ("GET", "/v1/nothing", {}, 404, "not_found"),
        ("GET", CHAT, {}, 405, "method_not_allowed"),
        ("POST", "/v1/models", {}, 405, "method_not_allowed"),
        ("DELETE", "/tokenize", {}, 405, "method_not_allowed"),
        ("GET", "/v1/models/nothing", {}, 404, "model_not_found"),
        ("GET", "/v1/models", {"tenant": ""}, 401, "invalid_api_key"),
        ("POST", CHAT, {"tenant": ""}, 401, "invalid_api_key"),
        ("POST", "/tokenize", {"json": {"model": "m"}}, 400, "invalid_value"),
        ("POST", "/v1/embeddings", {"json": EMBEDDINGS}, 404, "model_not_found"),
        ("POST", "/v1/embeddings", {"json": EMBEDDINGS | {"model": "nothing"}}, 404, "model_not_found"),
        ("POST", "/v1/embeddings", {"json": EMBEDDINGS, "tenant": "narrow"}, 403, "model_not_allowed"),
        ("POST", "/v1/embeddings", {"json": {"model": "m"}}, 400, "missing_required_parameter"),
    ],
)
def test_every_error_has_openais_form_and_an_id(edge, method, path, sent, status, code):
    answer = ask(edge, method, path, **sent)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"].startswith("req_")
    assert ("allow" in answer.headers) == (status == 405)

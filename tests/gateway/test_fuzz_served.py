"""The HTTP surface under fuzz: requests made from the OpenAPI document, and bytes that are no HTTP at all.

Wrong if any of it got a 500, hung, or learnt something of the inside.
"""

import copy
import json
import random
import re
import socket
import subprocess
import sys
import time

import httpx2
import pytest

from tests.gateway.serving import MODEL
from tritonforge.gateway.api.openapi import document

pytestmark = pytest.mark.server

INSIDE = re.compile(
    rb"Traceback|File \"|/site-packages|\.py\b|0x[0-9a-f]{8}|127\.0\.0\.1:|grpc|starlette|pydantic|uvicorn",
    re.IGNORECASE,
)
"""What no answer may hold."""
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/models")
TIMEOUT_S = 60
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def raw(gateway, data, *, half_close=True):
    """Everything that comes back for these bytes."""
    with socket.create_connection(gateway.address) as client:
        client.settimeout(TIMEOUT_S)
        try:
            client.sendall(data)
            if half_close:
                client.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: client.recv(65536), b""))
        except (ConnectionResetError, BrokenPipeError):
            return b""


def check(answer):
    assert not re.match(rb"HTTP/1\.1 5(?!03)", answer), answer[:400]
    body = answer.partition(b"\r\n\r\n")[2]
    assert not INSIDE.search(body), answer[:600]


def head(gateway, path, length):
    key = f"Authorization: Bearer {gateway.keys['open']}"
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{key}\r\nContent-Length: {length}\r\n\r\n".encode()


def test_bytes_that_are_no_http_end_the_connection_and_nothing_else(gateway):
    rng = random.Random(11)
    for _ in range(60):
        check(raw(gateway, rng.randbytes(rng.randrange(1, 400))))
    for data in (
        b"GET /%ff%fe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nzz\r\n",
        b"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer \xc3\x28\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ):
        check(raw(gateway, data))
    assert httpx2.get(f"{gateway.url}/health/live", trust_env=False).status_code == 200


def test_a_changed_body_is_answered_or_refused_in_the_apis_own_words(gateway):
    rng = random.Random(12)
    good = b'{"model": "%s", "prompt": "Hi", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}'
    good %= MODEL.encode()
    for index in range(150):
        body = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        answer = httpx2.post(
            gateway.url + PATHS[index % 5],
            content=bytes(body),
            headers=gateway.bearer(),
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        check(b"\r\n\r\n" + answer.content)
        assert answer.status_code in (200, 400, 404, 422)
        assert answer.status_code == 200 or set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_request_that_is_cut_off_anywhere_holds_nothing(gateway):
    body = b'{"model": "%s", "prompt": "Hi", "max_tokens": 2}' % MODEL.encode()
    whole = head(gateway, "/v1/completions", len(body)) + body
    for cut in range(1, len(whole), 7):
        check(raw(gateway, whole[:cut]))
    deadline = time.monotonic() + TIMEOUT_S
    while gateway.edge.open:
        assert time.monotonic() < deadline, gateway.edge.open
        time.sleep(0.01)


@pytest.mark.slow
def test_every_request_that_the_document_describes_is_answered_by_its_rules(gateway, tmp_path):
    """schemathesis: valid and invalid requests of every operation; needs requirements/gateway-tests.txt."""
    pytest.importorskip("schemathesis")
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(_narrowed(document())), encoding="utf-8")
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", str(file)]
    command += ["--url", gateway.url, "--header", f"Authorization: {gateway.bearer()['Authorization']}"]
    command += [
        "--phases",
        "coverage,fuzzing",
        "--checks",
        CHECKS,
        "--max-examples",
        "25",
        "--seed",
        "7",
        "--request-timeout",
        str(TIMEOUT_S),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def _narrowed(told):
    """The document for one model and short answers: else nearly all that is tried would be another model's, or long."""
    told = copy.deepcopy(told)
    for schema in told["components"]["schemas"].values():
        properties = schema.get("properties", {})
        if "model" in properties:
            properties["model"] = {"const": MODEL}
        for name, most in (("max_tokens", 4), ("max_completion_tokens", 4), ("n", 2)):
            for branch in properties.get(name, {}).get("anyOf", ()):
                branch |= {"maximum": most} if branch.get("type") == "integer" else {}
        if "max_tokens" in properties:
            schema["required"] = [*schema["required"], "max_tokens"]
            properties["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 4}
    return told

"""Servers that fail on demand: one that speaks Triton's gRPC protocol as our models do, and an OpenAI-compatible API.

Real servers answer in the other tests; a real one is killed in test_replica_killed.py. These can be stopped at an exact
token, which no real one can.
"""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tritonforge.contract import STATISTICS

TOKENS = 6
WAIT_S = 60.0


def text_of(name: str, count: int = TOKENS) -> str:
    """The whole answer of the server called `name`."""
    return "".join(f"{name}{place} " for place in range(count))


class TritonStandIn(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`tokenizer` makes one token of each word; `decoder` writes its server's name and a number, TOKENS times.

    `refuse` is an error in place of each answer; `hold_at` a number of tokens after which answers wait for `go`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.refuse = ""
        self.hold_at: int | None = None
        self.free: int | None = None
        """Answers that are left before all others wait for `go`, at their first token."""
        self._lock = threading.Lock()
        self.go = threading.Event()
        self.held = threading.Semaphore(0)
        """Released once for each answer that waits."""
        self.began: list[str] = []
        self.options: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.parameters: dict[str, dict[str, str]] = {}
        self.port = _free_port()
        self._server: grpc.Server | None = None

    @property
    def url(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, always on the same port."""
        self._server = grpc.server(ThreadPoolExecutor(64), options=(("grpc.so_reuseport", 0),))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(self.url)
        self._server.start()

    def die(self) -> None:
        """Break all connections at once."""
        if self._server is not None:
            self._server.stop(None).wait(WAIT_S)
            self._server = None

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=True)

    def ModelConfig(self, request: Any, context: Any) -> Any:
        if request.name not in self.parameters:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        answer = service_pb2.ModelConfigResponse()
        for name, value in self.parameters[request.name].items():
            answer.config.parameters[name].string_value = value
        return answer

    def ModelInfer(self, request: Any, context: Any) -> Any:
        words = request.raw_input_contents[0][4:].decode() or request.parameters["messages"].string_param
        ids = [hash(word) % 50_000 for word in words.split()]
        answer = service_pb2.ModelInferResponse(model_name="tokenizer")
        answer.outputs.add(name="input_ids", datatype="INT32", shape=(1, len(ids)))
        answer.outputs.add(name="prompt_truncated_tokens", datatype="INT32", shape=(1, 1))
        answer.raw_output_contents.extend([struct.pack(f"<{len(ids)}i", *ids), struct.pack("<i", 0)])
        return answer

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        for request in requests:
            if "cancel" in request.parameters:
                self.cancelled.append(request.parameters["cancel"].string_param)
                yield _final()
                continue
            self.began.append(request.id)
            self.options.append({name: _value(one) for name, one in request.parameters.items()})
            if self.refuse:
                yield service_pb2.ModelStreamInferResponse(error_message=self.refuse)
                continue
            yield from self._answer(request, context)

    def _answer(self, request: Any, context: Any) -> Iterator[Any]:
        version = request.model_version
        hold_at = self.hold_at
        with self._lock:
            if self.free is not None:
                self.free -= 1
                hold_at = 0 if self.free < 0 else hold_at
        for place in range(TOKENS):
            if place == hold_at:
                self.held.release()
                while not self.go.wait(0.01) and context.is_active():
                    pass
            if not context.is_active():
                return
            last = place == TOKENS - 1
            yield _chunk(
                f"{self.name}{version}{place} ", place, last=last, prompt=len(request.raw_input_contents[0]) // 4
            )


def _chunk(text: str, token: int, *, last: bool, prompt: int) -> Any:
    answer = service_pb2.ModelStreamInferResponse()
    inner = answer.infer_response
    raw = text.encode()
    tensors = [
        ("text_output", "BYTES", struct.pack("<I", len(raw)) + raw),
        ("token_ids", "INT32", struct.pack("<i", token)),
    ]
    if last:
        tensors.append(("finish_reason", "BYTES", struct.pack("<I", 4) + b"stop"))
        counts = {"prompt_tokens": prompt, "completion_tokens": TOKENS}
        tensors += [(one.name, "INT64", struct.pack("<q", counts.get(one.name, 0))) for one in STATISTICS]
    for name, datatype, content in tensors:
        inner.outputs.add(name=name, datatype=datatype, shape=(1, 1))
        inner.raw_output_contents.append(content)
    inner.parameters["triton_final_response"].bool_param = last
    return answer


def _final() -> Any:
    answer = service_pb2.ModelStreamInferResponse()
    answer.infer_response.parameters["triton_final_response"].bool_param = True
    return answer


def _value(parameter: Any) -> Any:
    return getattr(parameter, parameter.WhichOneof("parameter_choice"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def tritons(*names: str) -> Iterator[list[TritonStandIn]]:
    """One started stand-in for each name."""
    servers = [TritonStandIn(name) for name in names]
    for server in servers:
        server.start()
    try:
        yield servers
    finally:
        for server in servers:
            server.go.set()
            server.die()


class ManagedStandIn(ThreadingHTTPServer):
    """An OpenAI-compatible API that keeps the requests it got; `status` other than 200 refuses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.break_off = False
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    @property
    def base_url(self) -> str:
        """What a client takes."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: ManagedStandIn

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.path, headers, body))
        self.send_response(self.server.status)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        if self.server.status != 200:
            self.wfile.write(b'{"error": {"message": "account 42 is over its limit"}}')
            return
        for place in range(TOKENS // 2 if self.server.break_off else TOKENS):
            self._event({"choices": [{"index": 0, "delta": {"content": f"managed{place} "}, "finish_reason": None}]})
        if self.server.break_off:
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": TOKENS}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def managed_api() -> Iterator[ManagedStandIn]:
    """A started one."""
    server = ManagedStandIn()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()

"""What operators see of the real server when something breaks: not ready in time, ready again, the cause by name."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tritonclient.grpc import service_pb2_grpc

from tritonforge.client import connect, infer_request, stream
from tritonforge.launch import probe
from tritonforge.launch.probe import Condition, Target
from tritonforge.observation.observation import Observation
from tritonforge.server import Server

pytestmark = pytest.mark.server

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NOT_READY_S = 5.0
BACK_S = 40.0


class Collector:
    """Takes the spans that are sent to it, of the one trace that it expects."""

    def __init__(self) -> None:
        self.spans: list[str] = []
        self._came = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector._take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def _take(self, body: bytes) -> None:
        found = ExportTraceServiceRequest.FromString(body).resource_spans
        spans = [span for one in found for scope in one.scope_spans for span in scope.spans]
        assert {span.trace_id.hex() for span in spans} == {TRACEPARENT.split("-")[1]}
        with self._came:
            self.spans += [span.name for span in spans]
            self._came.notify_all()

    def await_spans(self, count: int) -> None:
        """Return once so many have come."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.spans) >= count, 30), self.spans

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()


def target(server: Server) -> Target:
    return Target(server.http_url, server.metrics_url)


def metrics(server: Server) -> str:
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as answer:
        return answer.read().decode()


def sample(server: Server, name: str, **labels: str) -> float:
    """The value of a series with these labels."""
    for line in metrics(server).splitlines():
        if line.startswith(f"tritonforge_{name}{{") and all(f'{key}="{text}"' in line for key, text in labels.items()):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"there is no {name} with {labels}")


def restarts(server: Server) -> dict[str, int]:
    """Restarts by cause, of those that happened."""
    found = re.findall(r'^tritonforge_restarts_total\{.*cause="(\w+)".*\} (\d+)$', metrics(server), re.MULTILINE)
    return {cause: int(count) for cause, count in found if int(count)}


def await_condition(server: Server, wanted: Callable[[Condition], bool], timeout_s: float) -> float:
    """Seconds until the probe's condition is a wanted one."""
    started = time.monotonic()
    while not wanted((verdict := probe.check(target(server))).condition):
        assert time.monotonic() - started < timeout_s, f"still {verdict}"
        time.sleep(0.05)
    return time.monotonic() - started


def decoder_pid(server: Server) -> int:
    return next(pid for pid in server.stub_pids() if "/decoder/" in Path(f"/proc/{pid}/cmdline").read_text())


@pytest.fixture
def collector(monkeypatch) -> Iterator[Collector]:
    """A collector of spans, which are sent soon."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    running = Collector()
    yield running
    running.close()


def test_a_frozen_engine_and_a_tampered_release_are_noticed_named_and_overcome(
    release_dir, tmp_path, caplog, collector
):
    """Wrong: traffic would go on to a server that answers nobody, or answers from weights that nobody built.

    The same server exports traces: a request's spans are in the trace of who asked, over gRPC's metadata as well.
    """
    release = shutil.copytree(release_dir, tmp_path / "release", ignore=shutil.ignore_patterns("__pycache__"))
    weights = next(release.rglob("openvino_model.bin"))
    weights.chmod(0o644)
    tampered = weights.stat().st_size // 2
    with Server(release, observe=Observation(otlp_endpoint=collector.url, trace_ratio=0.0)) as server:
        request = infer_request("llm", text="Say it", max_tokens=3, traceparent=TRACEPARENT)
        list(stream(server.grpc_url, request, 60))
        with connect(server.grpc_url) as channel:
            request = infer_request("llm", text="Say it", max_tokens=3)
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer
            list(call(iter((request,)), metadata=(("traceparent", TRACEPARENT),)))
        collector.await_spans(8)
        assert Counter(collector.spans) == dict.fromkeys(("llm_request", "queue", "prefill", "decode"), 2)
        os.kill(decoder_pid(server), signal.SIGSTOP)
        took = await_condition(server, lambda found: found is not Condition.READY, NOT_READY_S)
        back = await_condition(server, lambda found: found is Condition.READY, BACK_S)
        print(f"SIGSTOP: not ready after {took:.2f} s, ready again {back:.2f} s later")
        assert restarts(server) == {"stub_halted": 1} and "has halted" in caplog.text
        with open(weights, "r+b") as file:
            file.seek(tampered)
            byte = file.read(1)[0]
            file.seek(tampered)
            file.write(bytes((byte ^ 1,)))
        took = await_condition(server, lambda found: found is not Condition.READY, NOT_READY_S)
        with open(weights, "r+b") as file:
            file.seek(tampered)
            file.write(bytes((byte,)))
        back = await_condition(server, lambda found: found is Condition.READY, BACK_S)
        print(f"tampered: not ready after {took:.2f} s, ready again {back:.2f} s later")
        found = restarts(server)
        assert found["release_changed"] == 1 and set(found) <= {"stub_halted", "release_changed", "load_failed"}
        assert "openvino_model.bin" in caplog.text and "was changed while it was served" in caplog.text
        port = target(server).port
    assert probe.check(target(server)).condition is Condition.DEAD
    assert not list(Path(tempfile.gettempdir()).glob(f"tritonforge-*-{port}.json")), (
        "the state file outlives its server"
    )


def test_a_full_queue_is_not_ready_and_everybody_in_it_waits_for_a_reason(server, channel, occupied):
    """Wrong: a load balancer would go on sending requests to a server that refuses them."""
    config = next(server.release.model_repository.glob("decoder/*/decoder.json")).read_text(encoding="utf-8")
    most = json.loads(config)["scheduler"]["max_waiting"]
    await_condition(server, lambda found: found is Condition.READY, BACK_S)
    before = sample(server, "requests_rejected_total", reason="queue_full")
    with occupied() as seats:
        requests = [infer_request("decoder", input_ids=[504], max_tokens=1) for _ in range(most + 1)]
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(requests))
        seats.await_waiting(most)
        await_condition(server, lambda found: found is Condition.SATURATED, NOT_READY_S)
        assert sample(server, "num_requests_waiting_by_reason", reason="seats") == most
        assert sample(server, "queue_usage_ratio") == 1 and sample(server, "not_ready", reason="queue_full") == 1
    answers = list(call)
    assert sum("UNAVAILABLE" in answer.error_message for answer in answers) == 1
    await_condition(server, lambda found: found is Condition.READY, BACK_S)
    assert sample(server, "requests_rejected_total", reason="queue_full") - before == 1


def command(server: Server, *words: str) -> subprocess.CompletedProcess:
    """The command line, asking `server`."""
    arguments = [sys.executable, "-m", "tritonforge", *words, "--url", server.http_url]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)


def logged(server: Server, wanted: Callable[[dict], bool]) -> dict:
    """The first line of the decoder's log that is wanted, once it is there."""
    deadline = time.monotonic() + 20
    while True:
        lines = [json.loads(line) for line in server.log_tail(2000).splitlines() if line.startswith("{")]
        found = next((line for line in lines if wanted(line)), None)
        if found is not None:
            return found
        assert time.monotonic() < deadline, "the line was never logged"
        time.sleep(0.05)


def test_the_command_finds_the_server_ready(server):
    done = command(server, "probe", "--metrics-url", server.metrics_url)
    assert done.returncode == 0 and done.stdout.startswith("ready: "), done


def test_a_request_is_one_line_in_the_log_whose_content_can_be_asked_for_while_it_serves(server):
    def ask(request_id: str) -> dict:
        request = infer_request("llm", text="Say it", max_tokens=3, request_id=request_id, tenant="acme")
        list(stream(server.grpc_url, request, 60))
        return logged(server, lambda line: line.get("request_id") == request_id)

    first = ask("observed-first")
    assert first["tenant"] == "acme" and first["outcome"] in ("length", "stop") and "text" not in first
    try:
        assert command(server, "log", "--content", "on").returncode == 0
        logged(server, lambda line: line.get("message") == "logging at info, content on")
        assert ask("observed-second")["prompt"] == "Say it"
    finally:
        assert command(server, "log", "--content", "off").returncode == 0
    logged(server, lambda line: line.get("message") == "logging at info, content off")

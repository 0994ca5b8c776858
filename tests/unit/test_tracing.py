"""Traces: the spans of a request are its phases, in the trace of who asked, and exported as OTLP over HTTP."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tritonforge.errors import EngineFailure, InvalidRequest
from tritonforge.generate_request import GenerateRequest, Limits
from tritonforge.observation.request_record import RequestRecord
from tritonforge.observation.tracing import STATISTICS, Tracing
from tritonforge.timeline import Timeline

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
LABELS = {"model": "decoder", "version": "1"}
MS = 1_000_000


def record(traceparent="", *, error=None, **instants):
    known = {"scheduled_ns": 5 * MS, "first_token_ns": 30 * MS, "first_emit_ns": 31 * MS, "last_token_ns": 90 * MS}
    timeline = Timeline(0, **(known | instants))
    asked = GenerateRequest((1, 2, 3), 10, tenant="acme", traceparent=traceparent)
    statistics = None if error else dict.fromkeys(STATISTICS, 0) | {"completion_tokens": 4}
    return RequestRecord("error" if error else "stop", 91 * MS, "r-1", error, asked, timeline, statistics)


def exported(records, ratio=1.0):
    memory = InMemorySpanExporter()
    tracing = Tracing("http://unused", ratio, LABELS, memory)
    for one in records:
        tracing.export(one)
    tracing._provider.force_flush()
    spans = {span.name: span for span in memory.get_finished_spans()}
    tracing.close()
    return spans


def milliseconds(span, start_ns):
    return [(span.start_time - start_ns) // MS, (span.end_time - start_ns) // MS]


def test_the_spans_of_a_request_are_its_phases():
    spans = exported([record()])
    whole = spans["llm_request"]
    assert {name: milliseconds(span, whole.start_time) for name, span in spans.items()} == {
        "llm_request": [0, 91],
        "queue": [0, 5],
        "prefill": [5, 30],
        "decode": [30, 90],
    }
    assert all(spans[name].parent.span_id == whole.context.span_id for name in ("queue", "prefill", "decode"))
    assert whole.attributes["gen_ai.usage.output_tokens"] == 4 and whole.attributes["tritonforge.tenant"] == "acme"
    assert whole.resource.attributes["tritonforge.model"] == "decoder"


def test_a_traceparent_puts_the_spans_into_the_trace_of_who_asked():
    spans = exported([record(f"00-{TRACE}-{SPAN}-01")], ratio=0.0)
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    assert f"{spans['llm_request'].parent.span_id:016x}" == SPAN


def test_a_sender_that_does_not_trace_is_not_traced():
    assert exported([record(f"00-{TRACE}-{SPAN}-00")], ratio=1.0) == {}


def test_without_a_traceparent_a_share_is_traced():
    assert exported([record()], ratio=0.0) == {}


def test_a_request_that_fails_in_the_queue_has_no_phases_but_that_and_says_its_code():
    spans = exported([record(error=EngineFailure("x"), scheduled_ns=None, first_token_ns=None, last_token_ns=None)])
    assert set(spans) == {"llm_request", "queue"}
    assert milliseconds(spans["queue"], spans["llm_request"].start_time) == [0, 91]
    assert spans["llm_request"].attributes["error.type"] == "INTERNAL" and not spans["llm_request"].status.is_ok


def test_a_request_that_was_never_taken_in_has_no_span():
    assert exported([RequestRecord("error", 9, error=InvalidRequest("x"))]) == {}


def test_a_collector_gets_the_spans_over_http():
    got, path = threading.Event(), []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            path.append((self.path, self.rfile.read(int(self.headers["Content-Length"])), dict(self.headers)))
            self.send_response(200)
            self.end_headers()
            got.set()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    tracing = Tracing(f"http://127.0.0.1:{server.server_address[1]}", 1.0, LABELS)
    tracing.export(record())
    tracing.close()
    assert got.wait(10)
    server.shutdown()
    server.server_close()
    where, body, headers = path[0]
    if headers.get("Content-Encoding") == "gzip":
        import gzip

        body = gzip.decompress(body)
    message = ExportTraceServiceRequest.FromString(body)
    names = {span.name for one in message.resource_spans for scope in one.scope_spans for span in scope.spans}
    assert where == "/v1/traces" and names == {"llm_request", "queue", "prefill", "decode"}


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "x",
        f"00-{TRACE}-{SPAN}",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
    ],
)
def test_a_traceparent_that_is_none_is_refused(traceparent):
    with pytest.raises(InvalidRequest, match="traceparent must be a traceparent of W3C's Trace Context"):
        GenerateRequest.from_wire([1], {"traceparent": traceparent}, Limits(100, 100))


def test_a_valid_traceparent_is_the_requests():
    asked = GenerateRequest.from_wire([1], {"traceparent": f"00-{TRACE}-{SPAN}-01"}, Limits(100, 100))
    assert asked.traceparent == f"00-{TRACE}-{SPAN}-01"

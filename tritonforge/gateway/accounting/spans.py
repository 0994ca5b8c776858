"""A span of the edge for each sampled request, exported by OTLP as the decoder's are, which are its children.

It has the ids that were handed on as traceparent. Names: OpenTelemetry's conventions for HTTP servers and for models,
https://opentelemetry.io/docs/specs/semconv/http/http-spans/ and .../gen-ai/gen-ai-spans/
"""

import os
import threading
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from tritonforge.gateway.accounting.records import Record
from tritonforge.observation.tracing import CLOSE_S, PATH

ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
OPERATIONS = {"chat": "chat", "completions": "text_completion"}
SERVICE = "tritonforge-gateway"


class EdgeSpans:
    """See records.Observer: makes the span once the request is over; OpenTelemetry's own thread sends it."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        """`endpoint` is the collector's base URL, or its URL for traces; `exporter` is for tests."""
        url = endpoint if endpoint.endswith(PATH) else endpoint.rstrip("/") + PATH
        self._resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", SERVICE)})
        self._scope = InstrumentationScope("tritonforge")
        self._processor = BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=url))

    def observe(self, record: Record) -> None:
        """Export the request's span, if it is traced."""
        if not record.sampled:
            return
        ended_ns = int((record.started + record.duration_ms / 1e3) * 1e9)
        failed = record.status >= 500 or record.outcome == "failed"
        self._processor.on_end(
            ReadableSpan(
                name=f"POST {ROUTES[record.endpoint]}",
                context=_context(record.trace_id, record.span_id, remote=False),
                parent=_context(record.trace_id, record.parent_id, remote=True) if record.parent_id else None,
                resource=self._resource,
                attributes=attributes_of(record),
                kind=SpanKind.SERVER,
                status=Status(StatusCode.ERROR, record.error_code) if failed else Status(StatusCode.UNSET),
                start_time=int(record.started * 1e9),
                end_time=ended_ns,
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Send what is left, for up to CLOSE_S, and end."""
        closing = threading.Thread(target=self._processor.shutdown, name="spans-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def attributes_of(record: Record) -> dict[str, Any]:
    """OpenTelemetry's names where it has one, ours for the rest; no content."""
    found: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": ROUTES[record.endpoint],
        "http.response.status_code": record.status,
        "gen_ai.operation.name": OPERATIONS[record.endpoint],
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.served_model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.finish_reasons": list(record.finish_reasons),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "tritonforge.tenant": record.tenant,
        "tritonforge.outcome": record.outcome,
        "tritonforge.cached_tokens": record.cached_tokens,
        "tritonforge.replica": record.replica,
        "tritonforge.release_version": record.version,
        "tritonforge.fallback": record.fallback,
        "tritonforge.tries": record.tries,
    }
    if record.first_token_ms is not None:
        found["tritonforge.first_token_ms"] = record.first_token_ms
    if record.outcome != "ok":
        found["error.type"] = record.error_code or record.outcome
    return {name: value for name, value in found.items() if value != ""}


def _context(trace_id: str, span_id: str, *, remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), remote, TraceFlags(TraceFlags.SAMPLED))

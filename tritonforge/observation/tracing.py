"""Traces: a span for each sampled request, with its queue, prefill and decode below it, exported by OTLP over HTTP.

The reporter's thread makes them when a request has ended, from instants that are taken anyway; OpenTelemetry's own
thread sends them. Nothing of OpenTelemetry is loaded unless an endpoint is configured.
"""

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tritonforge.observation.request_record import RequestRecord
from tritonforge.timeline import Timeline

PATH = "/v1/traces"
STATISTICS = ("cached_tokens", "decode_steps", "preemptions", "draft_tokens", "accepted_tokens", "first_emit_us")
CLOSE_S = 2.0
"""How long close() waits for what is left to be sent: a collector that does not answer must not hold up the end."""


class Tracing:
    """Makes and exports the spans of ended requests.

    A request with a traceparent is traced when its sender traces it; of the others a share of `ratio` is.
    """

    def __init__(
        self, endpoint: str, ratio: float, labels: Mapping[str, str], exporter: SpanExporter | None = None
    ) -> None:
        """`endpoint` is the collector's base URL, or its URL for traces; `exporter` is for tests."""
        url = endpoint if endpoint.endswith(PATH) else endpoint.rstrip("/") + PATH
        attributes = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "tritonforge")}
        attributes |= {f"tritonforge.{name}": text for name, text in labels.items()}
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)), resource=Resource.create(attributes)
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("tritonforge")
        self._propagator = TraceContextTextMapPropagator()

    def export(self, record: RequestRecord) -> None:
        """The spans of a request that got as far as the loop."""
        asked, timeline = record.asked, record.timeline
        if asked is None or timeline is None:
            return
        offset_ns = time.time_ns() - time.monotonic_ns()
        parent = self._propagator.extract({"traceparent": asked.traceparent}) if asked.traceparent else Context()
        span = self._tracer.start_span(
            "llm_request", parent, kind=SpanKind.SERVER, start_time=timeline.arrived_ns + offset_ns
        )
        if not span.is_recording():
            return
        span.set_attributes(_attributes(record))
        if record.error is not None:
            span.set_status(Status(StatusCode.ERROR, record.code))
        self._phases(span, timeline, record.ended_ns, offset_ns)
        span.end(record.ended_ns + offset_ns)

    def close(self) -> None:
        """Send what is left, for up to CLOSE_S, and end."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _phases(self, span: Span, timeline: Timeline, ended_ns: int, offset_ns: int) -> None:
        """Child spans, of the phases that the request reached; one that it never left ends with it."""
        context = set_span_in_context(span)
        instants = (
            ("queue", timeline.arrived_ns, timeline.scheduled_ns),
            ("prefill", timeline.scheduled_ns, timeline.first_token_ns),
            ("decode", timeline.first_token_ns, timeline.last_token_ns),
        )
        for name, start_ns, end_ns in instants:
            if start_ns is not None:
                child = self._tracer.start_span(name, context, start_time=start_ns + offset_ns)
                child.end((ended_ns if end_ns is None else end_ns) + offset_ns)


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """OpenTelemetry's names for generative AI where they have one, ours for the rest; no content."""
    asked, sampling = record.asked, record.asked.sampling
    found: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.response.id": record.request_id,
        "gen_ai.request.max_tokens": asked.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": asked.n,
        "gen_ai.usage.input_tokens": len(asked.prompt_ids),
        "gen_ai.response.finish_reasons": [record.outcome],
        "tritonforge.tenant": asked.tenant,
        "tritonforge.priority_class": asked.priority,
    }
    if record.error is not None:
        found["error.type"] = record.code
    if record.statistics is not None:
        found["gen_ai.usage.output_tokens"] = record.statistics["completion_tokens"]
        found |= {f"tritonforge.{name}": record.statistics[name] for name in STATISTICS}
    return found

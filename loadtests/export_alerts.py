"""Alerts on the service itself, beside those on its promises: what no error budget tells soon enough.

Pure. Each reads families of the decoder's metric table only (a test compares), and each has a section in the runbook.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

RUNBOOK = "docs/runbook.md"
PAGE, TICKET = "page", "ticket"
REFUSALS = 'reason=~"queue_full|pushed_out|queue_timeout"'

RESTARTS = (
    "(max by (instance, cause) (max_over_time(tritonforge_restarts_total{{x}}[15m])) "
    "- min by (instance, cause) (min_over_time(tritonforge_restarts_total{{x}}[15m])))"
)
"""Not increase(): a new server may report under another version, in a series that begins at the count so far."""


@dataclass(frozen=True)
class Alert:
    """One alert: `expr` is PromQL, with {x} where the job's matcher belongs; `hold` is how long it must be true."""

    name: str
    expr: str
    hold: str
    severity: str
    summary: str


ALERTS = (
    Alert(
        "TritonForgeNotReady",
        'max by (instance, reason) (tritonforge_not_ready{reason=~"stalled|failed",{x}}) > 0',
        "30s",
        PAGE,
        "{{ $labels.instance }} answers no new request: {{ $labels.reason }}",
    ),
    Alert(
        "TritonForgeNoTokens",
        "sum by (instance) (tritonforge_num_requests_running{{x}}) > 0 "
        "and time() - max by (instance) (tritonforge_last_token_timestamp_seconds{{x}}) > 60",
        "1m",
        PAGE,
        "{{ $labels.instance }} runs {{ $value }} requests, and no token has come for a minute",
    ),
    Alert(
        "TritonForgeStandsStill",
        "time() - max by (instance) (tritonforge_heartbeat_timestamp_seconds{{x}}) > 15",
        "15s",
        PAGE,
        "the decoder of {{ $labels.instance }} has not run for {{ $value | humanizeDuration }}, and nobody replaced it",
    ),
    Alert(
        "TritonForgeRestarted",
        f"{RESTARTS} > 0",
        "0s",
        TICKET,
        "{{ $labels.instance }} was replaced by its supervisor: {{ $labels.cause }}",
    ),
    Alert(
        "TritonForgeRestartsOften",
        f"sum by (instance) ({RESTARTS}) > 2",
        "0s",
        PAGE,
        "{{ $labels.instance }} was replaced {{ $value | humanize }} times in 15 minutes",
    ),
    Alert(
        "TritonForgeInternalErrors",
        'sum by (instance) (increase(tritonforge_request_errors_total{code="INTERNAL",{x}}[5m])) > 0',
        "0s",
        PAGE,
        "{{ $labels.instance }} failed {{ $value | humanize }} requests by its own fault in 5 minutes",
    ),
    Alert(
        "TritonForgeQueueFilling",
        "max by (instance) (tritonforge_queue_usage_ratio{{x}}) > 0.8",
        "1m",
        TICKET,
        "the queue of {{ $labels.instance }} is {{ $value | humanizePercentage }} full",
    ),
    Alert(
        "TritonForgeRefusing",
        f"sum by (instance) (rate(tritonforge_requests_rejected_total{{{{x}},{REFUSALS}}}[5m])) "
        "> 0.01 * (sum by (instance) (rate(tritonforge_num_requests_finished_total{{x}}[5m])) "
        f"+ sum by (instance) (rate(tritonforge_requests_rejected_total{{{{x}},{REFUSALS}}}[5m])))",
        "1m",
        PAGE,
        "{{ $labels.instance }} refuses {{ $value | humanize }} requests a second for want of room",
    ),
    Alert(
        "TritonForgeKVCacheFull",
        "max by (instance) (tritonforge_kv_cache_usage_ratio{{x}}) > 0.95 "
        "and sum by (instance) (tritonforge_num_requests_waiting{{x}}) > 0",
        "5m",
        TICKET,
        "requests wait at {{ $labels.instance }} while {{ $value | humanizePercentage }} of its KV cache is taken",
    ),
    Alert(
        "TritonForgePreempting",
        "sum by (instance) (rate(tritonforge_num_preemptions_total{{x}}[10m])) "
        "> 0.1 * sum by (instance) (rate(tritonforge_num_requests_finished_total{{x}}[10m]))",
        "5m",
        TICKET,
        "{{ $labels.instance }} computes tokens twice: {{ $value | humanize }} preemptions a second",
    ),
    Alert(
        "TritonForgeDeadlinesMissed",
        'sum by (instance) (rate(tritonforge_request_errors_total{code="DEADLINE_EXCEEDED",{x}}[10m])) '
        "> 0.05 * sum by (instance) (rate(tritonforge_num_requests_finished_total{{x}}[10m]))",
        "5m",
        TICKET,
        "one request in twenty at {{ $labels.instance }} runs out of its own time",
    ),
)


def operating_alerts(selector: str, alerts: Iterable[Alert] = ALERTS) -> list[dict[str, Any]]:
    """The alerts as Prometheus has them; `selector` is a matcher like job="x", or nothing."""
    return [
        {
            "alert": one.name,
            "expr": _narrowed(one.expr, selector),
            "for": one.hold,
            "labels": {"severity": one.severity},
            "annotations": {"summary": one.summary, "runbook_url": runbook(one.name)},
        }
        for one in alerts
    ]


def runbook(alert: str) -> str:
    """Where an alert's section is."""
    return f"{RUNBOOK}#{alert.lower()}"


def _narrowed(expression: str, selector: str) -> str:
    """Put the job's matcher in its places; nothing, and no comma, when there is none."""
    for before, after in (("{x},", f"{selector}," if selector else ""), (",{x}", f",{selector}" if selector else "")):
        expression = expression.replace(before, after)
    return expression.replace("{{x}}", f"{{{selector}}}").replace("{x}", selector)

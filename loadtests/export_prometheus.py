"""Prometheus rules of a contract: error ratios over the usual windows, alerts on them and on the service. Pure."""

from typing import Any

from loadtests.export_alerts import operating_alerts, runbook
from loadtests.export_gateway import gateway_alerts
from loadtests.export_indicators import FINISHED, Indicator, Indicators

RECORD = "tritonforge_slo:error_ratio:rate"
WINDOWS = (
    ("5m", "1h", 14.4, "page"),
    ("30m", "6h", 6.0, "page"),
    ("2h", "1d", 3.0, "ticket"),
    ("6h", "3d", 1.0, "ticket"),
)
"""(short window, long window, burn rate, severity): both must burn. From Google's Site Reliability Workbook, ch. 5."""


def rules(found: Indicators) -> dict[str, Any]:
    """A rules file as a document: recordings, alerts on the promises, alerts on the service itself."""
    group = f"{found.contract.name}/{found.profile.id}"
    records = [record for one in found.found if not one.every for record in recordings(one)]
    alerts = [alert for one in found.found for alert in (every_alert(one) if one.every else burn_alerts(one))]
    return {
        "groups": [
            {"name": f"tritonforge-slo-records {group}", "interval": "30s", "rules": records},
            {"name": f"tritonforge-slo-alerts {group}", "rules": [*alerts, *liveness(found)]},
            {"name": "tritonforge-operation", "rules": operating_alerts(found.selector)},
            {"name": "tritonforge-gateway", "rules": gateway_alerts(found.selector)},
        ]
    }


def operator_rule(found: Indicators) -> dict[str, Any]:
    """The rules as a resource of the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tritonforge"},
        "spec": rules(found),
    }


def recordings(one: Indicator) -> list[dict[str, Any]]:
    """The error ratio over each window: the share of requests that were not good. No requests: no value."""
    windows = sorted({window for pair in WINDOWS for window in pair[:2]}, key=_seconds)
    return [
        {
            "record": f"{RECORD}{window}",
            "expr": f"1 - {one.good} / ({one.total} > 0)".replace("{window}", window),
            "labels": {"slo": one.slo},
        }
        for window in windows
    ]


def possible(one: Indicator, burn: float) -> bool:
    """Whether the error ratio can rise above so many times the budget: no ratio exceeds 1."""
    return burn * one.budget < 1


def burn_alerts(one: Indicator) -> list[dict[str, Any]]:
    """An alert for each pair of windows in which the budget burns too fast, and can."""
    return [
        {
            "alert": "TritonForgeSLOBurn",
            "expr": " and ".join(
                f'{RECORD}{window}{{slo="{one.slo}"}} > {burn:g} * {one.budget:g}' for window in (short, long)
            ),
            "labels": {"severity": severity, "slo": one.slo, "windows": f"{short}/{long}"},
            "annotations": {
                "summary": f"{one.slo}: its error budget burns {burn:g} times too fast",
                "description": f"Promised: {one.title}. "
                "{{ $value | humanizePercentage }} of the requests of the last " + f"{short} broke that.",
                "runbook_url": runbook("TritonForgeSLOBurn"),
            },
        }
        for short, long, burn, severity in WINDOWS
        if possible(one, burn)
    ]


def every_alert(one: Indicator) -> list[dict[str, Any]]:
    """A promise for every request has no budget: one request beyond it is an alert."""
    bad = f"{one.total} - {one.good}".replace("{window}", "5m")
    return [
        {
            "alert": "TritonForgeSLOBroken",
            "expr": f"{bad} > 0",
            "labels": {"severity": "page", "slo": one.slo},
            "annotations": {
                "summary": f"{one.slo}: promised is {one.title}, and a request broke that",
                "runbook_url": runbook("TritonForgeSLOBroken"),
            },
        }
    ]


def liveness(found: Indicators) -> list[dict[str, Any]]:
    """Metrics that are not there raise no other alert; a server that is down counts nothing."""
    absent = {
        "alert": "TritonForgeMetricsAbsent",
        "expr": f"absent({FINISHED}{{{found.selector}}})",
        "for": "10m",
        "labels": {"severity": "ticket"},
        "annotations": {
            "summary": "no server publishes the metrics that the SLO alerts are computed from",
            "runbook_url": runbook("TritonForgeMetricsAbsent"),
        },
    }
    if not found.selector:
        return [absent]
    down = {
        "alert": "TritonForgeDown",
        "expr": f"up{{{found.selector}}} == 0",
        "for": "1m",
        "labels": {"severity": "page"},
        "annotations": {
            "summary": "{{ $labels.instance }} does not answer Prometheus",
            "runbook_url": runbook("TritonForgeDown"),
        },
    }
    return [absent, down]


def _seconds(window: str) -> int:
    return int(window[:-1]) * {"m": 60, "h": 3600, "d": 86400}[window[-1]]

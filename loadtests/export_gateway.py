"""Alerts on the gateway and the rows of its panels, from the edge's own list of families. Pure.

Each alert reads families of that list only (a test compares), and has a section in the runbook. A gateway is scraped as
its own job: that of the servers with -gateway behind it.
"""

from typing import Any

from loadtests.export_alerts import PAGE, TICKET, Alert, operating_alerts
from tritonforge.gateway.accounting.edge_families import PREFIX, EdgeFamily

SELECT = 'instance=~"$gateway"'
VARIABLE = f"label_values({PREFIX}requests_open, instance)"
QUANTILES = (0.5, 0.95, 0.99)

ALERTS = (
    Alert(
        "TritonForgeGatewayFailing",
        'sum by (instance) (rate(tritonforge_gateway_requests_total{outcome="failed",{x}}[5m])) '
        "> 0.05 * sum by (instance) (rate(tritonforge_gateway_requests_total{{x}}[5m]))",
        "2m",
        PAGE,
        "{{ $labels.instance }} fails {{ $value | humanize }} requests a second, more than one in twenty",
    ),
    Alert(
        "TritonForgeGatewayNoReplica",
        "max by (instance, model) (tritonforge_gateway_replica_ready{{x}}) == 0",
        "30s",
        PAGE,
        "no replica of {{ $labels.model }} is ready, as {{ $labels.instance }} sees them",
    ),
    Alert(
        "TritonForgeGatewayReplicaAway",
        "min by (instance, model, replica) (tritonforge_gateway_replica_ready{{x}}) == 0",
        "5m",
        TICKET,
        "the replica {{ $labels.replica }} of {{ $labels.model }} is not ready, as {{ $labels.instance }} sees it",
    ),
    Alert(
        "TritonForgeGatewayBreakerOpen",
        "max by (instance, model, replica) (avg_over_time(tritonforge_gateway_breaker_state{{x}}[2m])) > 1.1",
        "1m",
        TICKET,
        "{{ $labels.instance }} keeps requests away from {{ $labels.replica }}, which keeps failing them",
    ),
    Alert(
        "TritonForgeGatewayFallingBack",
        "sum by (instance, alias) (rate(tritonforge_gateway_fallbacks_total{{x}}[10m])) > 0.02",
        "5m",
        TICKET,
        "requests for {{ $labels.alias }} at {{ $labels.instance }} are answered by another model",
    ),
    Alert(
        "TritonForgeGatewayRecordsWait",
        "max by (instance, what) (tritonforge_gateway_records_delay_seconds{{x}}) > 60",
        "1m",
        TICKET,
        "{{ $labels.instance }} cannot write its {{ $labels.what }} for {{ $value | humanizeDuration }}",
    ),
    Alert(
        "TritonForgeGatewayRecordsLost",
        "sum by (instance, what) (increase(tritonforge_gateway_records_lost_total{{x}}[10m])) > 0",
        "0s",
        PAGE,
        "{{ $labels.instance }} lost {{ $value | humanize }} records of its {{ $labels.what }}",
    ),
    Alert(
        "TritonForgeGatewayUnauthorized",
        "sum by (instance) (rate(tritonforge_gateway_unauthorized_total{{x}}[5m])) > 1",
        "5m",
        TICKET,
        "{{ $labels.instance }} turns away {{ $value | humanize }} requests a second for want of a valid key",
    ),
)


DOWN = Alert(
    "TritonForgeGatewayDown",
    "up{{x}} == 0",
    "1m",
    PAGE,
    "the gateway {{ $labels.instance }} does not answer Prometheus",
)


def gateway_selector(selector: str) -> str:
    """The matcher of the gateways' job, from that of the servers; nothing from nothing."""
    return f'{selector[:-1]}-gateway"' if selector else ""


def gateway_alerts(selector: str) -> list[dict[str, Any]]:
    """All as Prometheus has them; `selector` is the servers'. Without a job nobody knows which targets are gateways."""
    return operating_alerts(gateway_selector(selector), (*ALERTS, DOWN) if selector else ALERTS)


def gateway_queries(family: EdgeFamily) -> list[tuple[str, str]]:
    """PromQL and legend of a family's panel."""
    if family.kind == "histogram":
        by = ", ".join(("le", *family.labels))
        rate = f"sum by ({by}) (rate({family.name}_bucket{{{SELECT}}}[$__rate_interval]))"
        legend = " ".join(f"{{{{{label}}}}}" for label in family.labels)
        return [(f"histogram_quantile({one}, {rate})", f"p{one * 100:g} {legend}") for one in QUANTILES]
    labels = ("instance", *family.labels)
    by, legend = ", ".join(labels), " ".join(f"{{{{{label}}}}}" for label in labels)
    if family.kind == "counter":
        return [(f"sum by ({by}) (rate({family.name}{{{SELECT}}}[$__rate_interval]))", legend)]
    return [(f"max by ({by}) ({family.name}{{{SELECT}}})", legend)]


def gateway_title(family: EdgeFamily) -> str:
    """The name in words, without what its unit says."""
    name = family.name.removeprefix(PREFIX)
    for suffix in ("_total", "_seconds"):
        name = name.removesuffix(suffix)
    return f"gateway {name.replace('_', ' ')}"

"""OpenSLO v1 documents of a contract: a service, an SLO per promise, and burn-rate alert policies. Pure.

The specification: https://github.com/OpenSLO/OpenSLO. A promise for every request has no error budget, which OpenSLO
cannot say (a target is below 1): such promises are alerts of the Prometheus export only.
"""

import re
from collections.abc import Iterator
from typing import Any

from loadtests.export_indicators import Indicator, Indicators
from loadtests.export_prometheus import WINDOWS, possible

VERSION = "openslo/v1"
PERIOD = "28d"
NOTIFY = "on-call"
"""The notification target that the policies name; whoever imports the documents defines it."""


def documents(found: Indicators) -> Iterator[dict[str, Any]]:
    """All documents, those that others refer to first."""
    service = name(f"{found.contract.name}-{found.profile.id}")
    yield _document("Service", service, {"description": f"Contract {found.contract.name}, profile {found.profile.id}."})
    source = name(f"{service}-prometheus")
    yield _document("DataSource", source, {"type": "Prometheus", "connectionDetails": {}})
    for one in found.found:
        if one.every:
            continue
        policies = [policy for policy in _policies(one, service)]
        yield from policies
        yield _slo(one, service, source, [policy["metadata"]["name"] for policy in policies])


def name(text: str) -> str:
    """A name as OpenSLO wants it: RFC 1123, lower case letters, digits and hyphens, at most 63."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].strip("-")


def _document(kind: str, identity: str, spec: dict[str, Any], display: str | None = None) -> dict[str, Any]:
    metadata = {"name": identity} | ({"displayName": display} if display else {})
    return {"apiVersion": VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def _slo(one: Indicator, service: str, source: str, policies: list[str]) -> dict[str, Any]:
    identity = name(f"{service}-{one.objective.id}")

    def metric(query: str) -> dict[str, Any]:
        # Counters: who evaluates the document chooses the window.
        plain = re.sub(r"\(sum\(rate\((.*?)\[\{window\}\]\)\) or vector\(0\)\)", r"(sum(\1) or vector(0))", query)
        return {"metricSource": {"metricSourceRef": source, "type": "Prometheus", "spec": {"query": plain}}}

    ratio = {"counter": True, "good": metric(one.good), "total": metric(one.total)}
    spec = {
        "description": f"Promised: {one.title}.",
        "service": service,
        "indicator": {"metadata": {"name": f"{identity[:59]}-sli"}, "spec": {"ratioMetric": ratio}},
        "timeWindow": [{"duration": PERIOD, "isRolling": True}],
        "budgetingMethod": "Occurrences",
        "objectives": [{"displayName": one.title, "target": one.target}],
        "alertPolicies": [{"alertPolicyRef": policy} for policy in policies],
    }
    return _document("SLO", identity, spec, one.slo)


def _policies(one: Indicator, service: str) -> Iterator[dict[str, Any]]:
    """One policy per pair of windows: OpenSLO allows one condition each, and has one window: the long one."""
    for short, long, burn, severity in WINDOWS:
        if not possible(one, burn):
            continue
        identity = name(f"{service}-{one.objective.id}")[:55].strip("-") + f"-{long}"
        condition = {
            "kind": "AlertCondition",
            "metadata": {"name": f"{identity[:58]}-burn"},
            "spec": {
                "description": f"The error budget burns {burn:g} times too fast.",
                "severity": severity,
                "condition": {
                    "kind": "burnrate",
                    "op": "gt",
                    "threshold": burn,
                    "lookbackWindow": long,
                    "alertAfter": short,
                },
            },
        }
        spec = {
            "alertWhenNoData": False,
            "alertWhenResolved": True,
            "alertWhenBreaching": True,
            "conditions": [condition],
            "notificationTargets": [{"targetRef": NOTIFY}],
        }
        yield _document("AlertPolicy", identity, spec)

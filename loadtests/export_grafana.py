"""A Grafana dashboard from the decoder's metric table and a contract: one panel a family, one a promise. Pure.

Rows are the table's areas. A panel's queries follow from its family's kind and unit: a new family has a panel at once.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from loadtests import export_gateway
from loadtests.export_indicators import HISTOGRAMS, PREFIX, Indicator, Indicators
from loadtests.export_prometheus import RECORD
from tritonforge.gateway.accounting.edge_families import FAMILIES as GATEWAY_FAMILIES
from tritonforge.gateway.accounting.edge_families import EdgeFamily
from tritonforge.observation.metrics import AREAS, FAMILIES, MetricFamily

UID = "tritonforge"
SELECT = 'instance=~"$instance"'
QUANTILES = (0.5, 0.95, 0.99)
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
UNITS = {"seconds": "s", "ratio": "percentunit", "bytes": "bytes"}
"""Grafana's own units; any other unit of the table is shown as it is named."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(found: Indicators) -> dict[str, Any]:
    """The dashboard as Grafana imports it; the same for the same table and contract."""
    rows = [("Promises", [_promise(one) for one in found.found])]
    rows += [(area.capitalize(), [_panel(one, found) for one in FAMILIES if one.area == area]) for area in AREAS]
    rows.append(("Gateway", [_gateway_panel(one) for one in GATEWAY_FAMILIES]))
    return {
        "uid": UID,
        "title": f"TritonForge: {found.contract.name}, {found.profile.id}",
        "description": f"Contract {found.contract.name} revision {found.contract.revision}",
        "tags": ["tritonforge"],
        "schemaVersion": 39,
        "editable": False,
        "timezone": "utc",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_laid_out(rows)),
    }


def queries(panel: dict[str, Any]) -> list[str]:
    """The PromQL of a panel; a row has none."""
    return [target["expr"] for target in panel.get("targets", ())]


def _variables() -> list[dict[str, Any]]:
    every = {"includeAll": True, "multi": True, "refresh": 2, "current": {"text": "All", "value": "$__all"}}
    query = f"label_values({PREFIX}_num_requests_running, instance)"
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {"name": "instance", "type": "query", "datasource": DATASOURCE, "query": query, "label": "Server", **every},
        {
            "name": "gateway",
            "type": "query",
            "datasource": DATASOURCE,
            "query": export_gateway.VARIABLE,
            "label": "Gateway",
            **every,
        },
    ]


def _laid_out(rows: Iterable[tuple[str, list[dict[str, Any]]]]) -> Iterator[dict[str, Any]]:
    """Rows of panels with their places and ids."""
    ids, top = itertools.count(1), 0
    for title, panels in rows:
        place = {"x": 0, "y": top, "w": COLUMNS * WIDTH, "h": 1}
        yield {"id": next(ids), "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        top += 1
        for index, panel in enumerate(panels):
            row, column = divmod(index, COLUMNS)
            place = {"x": column * WIDTH, "y": top + row * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield {"id": next(ids), **panel, "gridPos": place}
        top += -(-len(panels) // COLUMNS) * HEIGHT


def _promise(one: Indicator) -> dict[str, Any]:
    """The share of requests that break a promise, beside the share that may; of a promise for all: how many do."""
    title = f"promised {one.objective.id}"
    if one.every:
        bad = f"({one.total} - {one.good}) * 60".replace("{window}", "5m")
        return _chart(title, f"{one.title}.", [(bad, "broken a minute")], "short", limit=0)
    targets = [(f'{RECORD}{window}{{slo="{one.slo}"}}', f"over {window}") for window in ("5m", "1h", "1d")]
    return _chart(title, f"{one.title}.", targets, "percentunit", limit=one.budget)


def _panel(family: MetricFamily, found: Indicators) -> dict[str, Any]:
    title = _title(family)
    text = f"{family.help}. `{family.name}`, a {family.kind}."
    text += f" vLLM has it as `{family.vllm}`." if family.vllm else ""
    unit = UNITS.get(family.unit, f"suffix: {family.unit}")
    if family.kind == "histogram":
        return _chart(title, text, list(_quantiles(family.name)), unit, limit=_limit(family.name, found))
    labels = ("instance", "version", *family.labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    by = ", ".join(labels)
    if family.unit == "restarts":  # few, and each under a version of its own: a rate would show none of them
        return _chart(title, text, [(f"max by ({by}) ({_of(family)})", legend)], "none")
    if family.kind == "counter":
        rate = f"sum by ({by}) (rate({family.name}{{{SELECT}}}[$__rate_interval]))"
        return _chart(title, text, [(rate, legend)], f"suffix: {family.unit}/s")
    if family.name.endswith("_time_seconds") or family.name.endswith("_timestamp_seconds"):
        return _chart(f"{title}: ago", text, [(f"time() - max by ({by}) ({_of(family)})", legend)], "s")
    return _chart(title, text, [(f"max by ({by}) ({_of(family)})", legend)], unit)


def _gateway_panel(family: EdgeFamily) -> dict[str, Any]:
    text = f"{family.help}. `{family.name}`, a {family.kind}."
    unit = UNITS.get(family.unit, f"suffix: {family.unit}{'/s' if family.kind == 'counter' else ''}")
    return _chart(export_gateway.gateway_title(family), text, export_gateway.gateway_queries(family), unit)


def _title(family: MetricFamily) -> str:
    """The name in words, without what its unit says: "kv cache usage"."""
    name = family.name.removeprefix(f"{PREFIX}_")
    for suffix in ("_total", "_timestamp_seconds", "_time_seconds", "_seconds", "_ratio"):
        name = name.removesuffix(suffix)
    return name.replace("_", " ")


def _of(family: MetricFamily) -> str:
    return f"{family.name}{{{SELECT}}}"


def _quantiles(name: str) -> Iterator[tuple[str, str]]:
    for quantile in QUANTILES:
        rate = f"sum by (le, version) (rate({name}_bucket{{{SELECT}}}[$__rate_interval]))"
        yield f"histogram_quantile({quantile}, {rate})", f"p{quantile * 100:g} {{{{version}}}}"


def _limit(name: str, found: Indicators) -> float | None:
    """The strictest limit in seconds that the contract sets on a histogram, None without one."""
    objectives = [one.objective for one in found.found if one.objective.metric in HISTOGRAMS]
    limits = [one.le / 1000 for one in objectives if f"{PREFIX}_{HISTOGRAMS[one.metric]}" == name]
    return min(limits, default=None)


def _chart(
    title: str, text: str, targets: list[tuple[str, str]], unit: str, *, limit: float | None = None
) -> dict[str, Any]:
    steps = [{"color": "green", "value": None}] + ([] if limit is None else [{"color": "red", "value": limit}])
    style = "off" if limit is None else "dashed"
    return {
        "type": "timeseries",
        "title": title,
        "description": text,
        "datasource": DATASOURCE,
        "targets": [
            {"refId": letter, "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for letter, (expression, legend) in zip("ABCDEF", targets, strict=False)
        ],
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "thresholds": {"mode": "absolute", "steps": steps},
                "custom": {"thresholdsStyle": {"mode": style}, "fillOpacity": 10, "showPoints": "never"},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }

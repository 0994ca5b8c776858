"""The alerts and panels of the gateway: made from its own list of families, complete, and right for Prometheus."""

import subprocess

import pytest
import test_dashboard
import yaml
from test_dashboard import MATCHER, PROMTOOL, SERIES, _test_of

from loadtests.export_gateway import ALERTS, DOWN, gateway_alerts
from loadtests.export_grafana import dashboard, queries
from loadtests.export_yaml import to_yaml
from tritonforge.gateway.accounting.edge_families import FAMILIES

found = test_dashboard.found
TABLE = {f"{one.name}{part}": one for one in FAMILIES for part in ("", "_bucket", "_count", "_sum")}


def test_every_family_of_the_gateway_has_one_panel_in_its_row(found):
    """Wrong if it failed: a metric that nobody sees."""
    row, shown = "", []
    for panel in dashboard(found)["panels"]:
        row = panel["title"] if panel["type"] == "row" else row
        if row == "Gateway":
            shown += sorted({TABLE[name].name for query in queries(panel) for name, _ in SERIES.findall(query)})
    assert shown == [one.name for one in FAMILIES]


@pytest.mark.parametrize("alert", gateway_alerts(""), ids=lambda alert: alert["alert"])
def test_an_alert_reads_only_series_and_values_that_the_gateway_has(alert):
    read = SERIES.findall(alert["expr"])
    assert read
    for name, selector in read:
        known = dict(TABLE[name].values)
        for label, _, wanted in MATCHER.findall(selector):
            assert label in TABLE[name].labels and wanted in known.get(label, (wanted,))


def test_a_job_narrows_every_series_to_the_gateways_own(found):
    rules = gateway_alerts(found.selector)
    assert {one["alert"] for one in rules} == {one.name for one in (*ALERTS, DOWN)}
    for one in rules:
        read = SERIES.findall(one["expr"].replace("up{", "tritonforge_up{"))
        assert read and all(f'{found.selector[:-1]}-gateway"' in selector for _, selector in read), one["alert"]


GATEWAY = "tritonforge_gateway_"
PLACE = 'model="m",replica="r",%s'
FIRES = {
    "TritonForgeGatewayFailing": {
        GATEWAY + 'requests_total{outcome="failed",%s}': "0+6x20",
        GATEWAY + 'requests_total{outcome="ok",%s}': "0+94x20",
    },
    "TritonForgeGatewayNoReplica": {GATEWAY + f"replica_ready{{{PLACE}}}": "0x20"},
    "TritonForgeGatewayReplicaAway": {
        GATEWAY + f"replica_ready{{{PLACE}}}": "0x20",
        GATEWAY + 'replica_ready{model="m",replica="other",%s}': "1x20",
    },
    "TritonForgeGatewayBreakerOpen": {GATEWAY + f"breaker_state{{{PLACE}}}": "2x20"},
    "TritonForgeGatewayFallingBack": {GATEWAY + 'fallbacks_total{alias="a",model="m",%s}': "0+2x20"},
    "TritonForgeGatewayRecordsWait": {GATEWAY + 'records_delay_seconds{what="audit",%s}': "0+60x20"},
    "TritonForgeGatewayRecordsLost": {GATEWAY + 'records_lost_total{what="usage",%s}': "0x15 7x5"},
    "TritonForgeGatewayUnauthorized": {GATEWAY + 'unauthorized_total{endpoint="chat",%s}': "0+90x20"},
    "TritonForgeGatewayDown": {"up{%s}": "1x10 0x10"},
}
"""Series under which each alert fires within 20 minutes."""
QUIET = {
    GATEWAY + 'requests_total{outcome="failed",%s}': "0+4x20",
    GATEWAY + 'requests_total{outcome="refused",%s}': "0+50x20",
    GATEWAY + 'requests_total{outcome="ok",%s}': "0+96x20",
    GATEWAY + f"replica_ready{{{PLACE}}}": "1x17 0 1x2",
    GATEWAY + 'breaker_state{model="m",replica="away",%s}': "2x5 1x15",
    GATEWAY + 'fallbacks_total{alias="a",model="m",%s}': "1x20",
    GATEWAY + 'records_delay_seconds{what="audit",%s}': "0x10 20 0x9",
    GATEWAY + 'records_lost_total{what="usage",%s}': "7x20",
    GATEWAY + 'unauthorized_total{endpoint="chat",%s}': "0+30x20",
    "up{%s}": "1x20",
}
"""A busy gateway, clients that send nonsense, a replica that was replaced, a breaker that nobody has asked since."""


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: package prometheus)")
def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else(tmp_path):
    """In Prometheus itself. A model whose only replica is away raises both alerts on replicas."""
    assert set(FIRES) == {alert["alert"] for alert in gateway_alerts('job="x"')}
    also = {"TritonForgeGatewayNoReplica": {"TritonForgeGatewayReplicaAway"}}
    tests = [_test_of(series, {name} | also.get(name, set())) for name, series in FIRES.items()]
    tests.append(_test_of(QUIET, set()))
    text = to_yaml([{"groups": [{"name": "gateway", "rules": gateway_alerts('job="j"')}]}])
    (tmp_path / "rules.yml").write_text(text.replace("j-gateway", "j"))
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": tests}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [PROMTOOL, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

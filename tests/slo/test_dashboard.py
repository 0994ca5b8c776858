"""The dashboard and the alerts on the service: drawn from the metric table, complete, and right for Prometheus."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from loadtests.contract_toml import parse_contract
from loadtests.export import main
from loadtests.export_alerts import ALERTS, RUNBOOK, operating_alerts
from loadtests.export_grafana import COLUMNS, WIDTH, dashboard, queries
from loadtests.export_indicators import indicators_of
from loadtests.export_prometheus import operator_rule, rules
from loadtests.export_yaml import to_yaml
from tritonforge.observation.metrics import AREAS, FAMILIES

ROOT = Path(__file__).resolve().parent.parent.parent
GENERATED = ROOT / "docker" / "generated"
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
SERIES = re.compile(r"(tritonforge_[a-z0-9_]+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
OWN = {"instance", "job", "version", "model", "le"}
TABLE = {f"{one.name}{part}": one for one in FAMILIES for part in ("", "_bucket", "_count", "_sum")}


@pytest.fixture
def found(document):
    contract = parse_contract(document)
    return indicators_of(contract, contract.profiles[0], job="tritonforge")


def test_every_family_of_the_table_has_one_panel_in_the_row_of_its_area(found):
    """Wrong if it failed: a metric that nobody sees, or one that is shown under another heading."""
    row, shown = None, {}
    for panel in dashboard(found)["panels"]:
        row = panel["title"].lower() if panel["type"] == "row" else row
        for name in {name for query in queries(panel) for name, _ in SERIES.findall(query)} if row in AREAS else ():
            shown.setdefault(TABLE[name].name, []).append(row)
    assert shown == {one.name: [one.area] for one in FAMILIES}


def test_every_promise_that_is_exported_has_a_panel_with_its_limit(found):
    panels = {panel["title"]: panel for panel in dashboard(found)["panels"] if panel["type"] != "row"}
    for one in found.found:
        assert one.title in panels[f"promised {one.objective.id}"]["description"]
        limit = panels[f"promised {one.objective.id}"]["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
        assert limit == (0 if one.every else one.budget)
    assert panels["ttft"]["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"] == 0.3


def test_panels_have_places_of_their_own(found):
    taken = set()
    panels = dashboard(found)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for place in (panel["gridPos"] for panel in panels):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < COLUMNS * WIDTH
        taken |= cells


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_reads_only_series_that_the_table_has(alert):
    """Wrong if it failed: an alert on a label value or a series that never exists, so it could never fire."""
    read = SERIES.findall(operating_alerts("")[ALERTS.index(alert)]["expr"])
    assert read
    for name, selector in read:
        family = TABLE[name]
        for label, sign, wanted in MATCHER.findall(selector):
            assert label in family.labels, (alert.name, label)
            known = {values[family.labels.index(label)] for values in family.values}
            assert sign in ("=", "=~") and set(wanted.split("|")) <= known, (alert.name, wanted, known)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_a_job_narrows_every_series_of_an_alert(alert):
    one = operating_alerts('job="triton"')[ALERTS.index(alert)]["expr"]
    assert all('job="triton"' in selector for _, selector in SERIES.findall(one)) and "{x}" not in one
    assert len(SERIES.findall(one)) == one.count("tritonforge_")


def test_the_runbook_has_a_section_for_each_alert_and_for_nothing_else(found):
    """Wrong if it failed: somebody is woken up and the page says nothing."""
    exported = [rule for group in rules(found)["groups"] for rule in group["rules"] if "alert" in rule]
    names = {rule["alert"] for rule in exported} | {"TritonForgeSLOBroken"}
    text = (ROOT / RUNBOOK).read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (TritonForge\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert set(sections) == names
    for name, body in sections.items():
        assert all(f"**{part}**" in body for part in ("Means.", "Look.", "Do.")), name
    for rule in exported:
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOK}#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_the_files_in_the_repository_are_what_the_table_and_the_demo_contract_make(tmp_path, capsys):
    """If it fails: make dashboards."""
    contract = ROOT / "loadtests" / "contracts" / "demo.toml"
    assert main(["--contract", str(contract), "--job", "tritonforge", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    made = [file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()]
    assert len(made) == 5
    for file in made:
        assert (GENERATED / file).read_text(encoding="utf-8") == (tmp_path / file).read_text(encoding="utf-8"), file
    dashboard_file = json.loads((GENERATED / "dashboard.json").read_text(encoding="utf-8"))
    assert dashboard_file["uid"] == "tritonforge"


def test_the_operators_resource_holds_the_same_rules(found):
    assert operator_rule(found)["spec"] == rules(found)


INSTANCE = 'instance="a",job="j"'
FIRES = {
    "TritonForgeNotReady": {'tritonforge_not_ready{reason="failed",%s}': "1x20"},
    "TritonForgeNoTokens": {
        "tritonforge_num_requests_running{%s}": "3x20",
        "tritonforge_last_token_timestamp_seconds{%s}": "900x20",
    },
    "TritonForgeStandsStill": {"tritonforge_heartbeat_timestamp_seconds{%s}": "0x20"},
    "TritonForgeRestarted": {'tritonforge_restarts_total{cause="stub_died",%s}': "0x10 1x10"},
    "TritonForgeRestartsOften": {'tritonforge_restarts_total{cause="stub_died",%s}': "0+1x20"},
    "TritonForgeInternalErrors": {'tritonforge_request_errors_total{code="INTERNAL",%s}': "0x15 2x5"},
    "TritonForgeQueueFilling": {"tritonforge_queue_usage_ratio{%s}": "0.9x20"},
    "TritonForgeRefusing": {
        'tritonforge_requests_rejected_total{reason="queue_full",%s}': "0+2x20",
        'tritonforge_num_requests_finished_total{finish_reason="stop",%s}': "0+98x20",
    },
    "TritonForgeKVCacheFull": {
        "tritonforge_kv_cache_usage_ratio{%s}": "0.97x20",
        "tritonforge_num_requests_waiting{%s}": "1x20",
    },
    "TritonForgePreempting": {
        "tritonforge_num_preemptions_total{%s}": "0+11x20",
        'tritonforge_num_requests_finished_total{finish_reason="stop",%s}': "0+100x20",
    },
    "TritonForgeDeadlinesMissed": {
        'tritonforge_request_errors_total{code="DEADLINE_EXCEEDED",%s}': "0+6x20",
        'tritonforge_num_requests_finished_total{finish_reason="stop",%s}': "0+100x20",
    },
}
"""Series under which each alert fires within 20 minutes."""
QUIET = {
    'tritonforge_not_ready{reason="failed",%s}': "0x20",
    'tritonforge_not_ready{reason="queue_full",%s}': "1x20",
    "tritonforge_num_requests_running{%s}": "3x20",
    "tritonforge_last_token_timestamp_seconds{%s}": "0+60x20",
    "tritonforge_heartbeat_timestamp_seconds{%s}": "0+60x20",
    'tritonforge_restarts_total{cause="stub_died",%s}': "2x20",
    'tritonforge_request_errors_total{code="INTERNAL",%s}': "3x20",
    'tritonforge_request_errors_total{code="DEADLINE_EXCEEDED",%s}': "0+4x20",
    'tritonforge_requests_rejected_total{reason="queue_full",%s}': "0+0.5x20",
    'tritonforge_requests_rejected_total{reason="invalid",%s}': "0+50x20",
    "tritonforge_queue_usage_ratio{%s}": "0.7x20",
    "tritonforge_kv_cache_usage_ratio{%s}": "0.97x20",
    "tritonforge_num_requests_waiting{%s}": "0x20",
    "tritonforge_num_preemptions_total{%s}": "0+9x20",
    'tritonforge_num_requests_finished_total{finish_reason="stop",%s}': "0+100x20",
}
"""A busy service, a restart long ago, a client that sends nonsense: nobody is called."""


def _test_of(series: dict[str, str], firing: set[str]) -> dict:
    return {
        "interval": "1m",
        "input_series": [{"series": name % INSTANCE, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": "count by (alertname) (ALERTS{alertstate='firing'})",
                "eval_time": "20m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)],
            }
        ],
    }


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: package prometheus)")
def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else(tmp_path):
    """In Prometheus itself. A restart every minute raises both alerts on restarts."""
    assert set(FIRES) == {alert.name for alert in ALERTS}
    also = {"TritonForgeRestartsOften": {"TritonForgeRestarted"}}
    tests = [_test_of(series, {name} | also.get(name, set())) for name, series in FIRES.items()]
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [*tests, _test_of(QUIET, set())]}
    group = {"name": "operation", "rules": operating_alerts('job="j"')}
    (tmp_path / "rules.yml").write_text(to_yaml([{"groups": [group]}]))
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [PROMTOOL, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

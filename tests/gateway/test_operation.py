"""What an on-call engineer has of the gateway, beside a real Prometheus: panels, rules, the runbook's commands.

Wrong if it failed: a panel or an alert without its data, or a command of the runbook that ends with an error.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import httpx2
import pytest

from loadtests.export_grafana import queries
from tests.gateway.serving import serve_gateway
from tests.gateway.stand_ins import tritons
from tests.gateway.test_routing import ask
from tests.slo.slo_prometheus import NEEDED, Prometheus
from tritonforge.gateway.accounting.metrics_server import metrics_server
from tritonforge.launch.ports import Ports

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "docker" / "generated"
DATA_S = 60.0
FIRES_S = 120.0


def commands(language):
    """The blocks of the runbook in a language, each once."""
    text = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    return list(dict.fromkeys(re.findall(rf"^```{language} gateway\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)))


@pytest.fixture(scope="module")
def operated(tmp_path_factory):
    """A gateway after some requests of every kind of end, its Prometheus, and the model's replica."""
    folder = tmp_path_factory.mktemp("operated")
    with tritons("m", "next") as (m, following):
        tables = {
            "models": {"m": {"replicas": [m.url]}, "next": {"replicas": [following.url]}},
            "aliases": {"chat": {"models": "m", "fallback": ["next"]}},
            "audit": {"folder": str(folder / "audit")},
            "usage": {"file": str(folder / "usage.sqlite")},
            "routing": {"health_s": 0.2},
        }
        with (
            serve_gateway(None, None, folder, tables, keep=True) as gateway,
            metrics_server(gateway.edge.metrics, "127.0.0.1", 0) as url,
        ):
            target = url.removeprefix("http://").removesuffix("/metrics")
            port = Ports(0, 0, 0).claim("127.0.0.1").http
            rules = GENERATED / "rules.yml"
            with Prometheus(folder, target, port, rules, "tritonforge-gateway") as prometheus:
                _ask_of_every_kind(gateway, m)
                yield gateway, target, prometheus, m


def _ask_of_every_kind(gateway, m):
    for _ in range(3):
        assert ask(gateway, "chat").status_code == 200
    m.refuse = "UNAVAILABLE: the queue is full"
    assert ask(gateway, "chat").status_code == 200
    m.refuse = "INTERNAL: it failed"
    assert ask(gateway, "m").status_code == 500
    m.refuse = ""
    assert httpx2.post(f"{gateway.url}/v1/chat/completions", json={}, trust_env=False).status_code == 401
    gateway.edge.metrics._filtered.labels("prompt", "words", "block").inc()
    gateway.await_records(5)


@NEEDED
def test_no_panel_of_the_gateway_is_without_data(operated):
    gateway, _, prometheus, _ = operated
    panels = json.loads((GENERATED / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    drawn = [query for panel in panels for query in queries(panel) if "$gateway" in query]
    empty = [query.replace("$gateway", ".+").replace("$__rate_interval", "1m") for query in drawn]
    assert len(drawn) > 15

    def shrink():
        assert ask(gateway, "chat").status_code == 200  # a rate needs what goes on
        empty[:] = [query for query in empty if not prometheus.query(query)]
        return not empty

    assert prometheus.wait(shrink, DATA_S), empty


@NEEDED
def test_every_series_that_a_rule_on_the_gateway_reads_is_scraped(operated):
    _, _, prometheus, _ = operated
    rules = (GENERATED / "rules.yml").read_text(encoding="utf-8").replace('\\"', '"')
    selectors = set(re.findall(r'(\w+\{[^}]*job="tritonforge-gateway"[^}]*\})', rules))
    assert len(selectors) >= 8
    missing = [one for one in selectors if not prometheus.wait(lambda one=one: prometheus.query(one), DATA_S)]
    assert not missing


@NEEDED
@pytest.mark.parametrize("query", commands("promql"))
def test_a_query_of_the_runbook_has_data(operated, query):
    _, _, prometheus, _ = operated
    assert prometheus.wait(lambda: prometheus.query(query.replace("[1h]", "[1m]")), DATA_S), query


@pytest.mark.parametrize("command", commands("sh"))
def test_a_command_of_the_runbook_works(tmp_path, command):
    with tritons("m") as (m,), serve_gateway(None, None, tmp_path, {"models": {"m": {"replicas": [m.url]}}}) as gateway:
        variables = os.environ | {"GATEWAY": gateway.url.removeprefix("http://"), "no_proxy": "127.0.0.1"}
        done = subprocess.run(["/bin/bash", "-c", command], env=variables, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr


@NEEDED
@pytest.mark.slow
def test_a_replica_that_dies_raises_the_alert_on_that_alone_and_one_that_comes_back_ends_it(operated):
    _, _, prometheus, m = operated
    m.die()
    assert prometheus.wait(lambda: "TritonForgeGatewayNoReplica" in prometheus.firing(), FIRES_S)
    assert prometheus.firing() - {"TritonForgeMetricsAbsent"} == {"TritonForgeGatewayNoReplica"}
    m.start()
    assert prometheus.wait(lambda: "TritonForgeGatewayNoReplica" not in prometheus.firing(), FIRES_S)

"""The runbook's commands are run, and every panel of the dashboard is drawn, against the real server.

Wrong if it failed: at three in the morning a command of the runbook ends with an error, or a panel is empty.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slo_prometheus import NEEDED, Prometheus

from loadtests.export_grafana import queries
from tritonforge.client import generate, infer_request
from tritonforge.launch.ports import Ports

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parent.parent.parent
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
DATA_S = 60.0


def commands(language: str) -> list[str]:
    """The blocks of the runbook in a language, each once."""
    return list(dict.fromkeys(re.findall(rf"^```{language}\n(.*?)\n```$", RUNBOOK, re.MULTILINE | re.DOTALL)))


@pytest.fixture
def variables(server):
    """What the head of the runbook exports, for this server; `tritonforge` is the one that is tested."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    urls = {"HTTP": server.http_url, "GRPC": server.grpc_url, "METRICS": server.metrics_url}
    return os.environ | {"PATH": path, "GRPC_PORT": str(server.ports.grpc), "RELEASE": str(server.release.root)} | urls


@pytest.mark.parametrize("command", commands("sh"))
def test_a_command_of_the_runbook_works(variables, command):
    done = subprocess.run(["/bin/bash", "-o", "pipefail", "-c", command], env=variables, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr


@pytest.fixture(scope="module")
def prometheus(server, tmp_path_factory):
    """Prometheus with the rules of the demo contract, after some requests of each kind of end."""
    port = Ports(0, 0, 0).claim("127.0.0.1").http
    rules = ROOT / "docker" / "generated" / "rules.yml"
    with Prometheus(tmp_path_factory.mktemp("prometheus"), server.metrics_url, port, rules) as running:
        for number in range(4):
            prompt = "one two three four five six seven eight nine ten " * (number + 1)
            generate(
                server.grpc_url, infer_request("llm", text=prompt, max_tokens=12, ignore_eos=True, stream=True), 60
            )
        yield running


@NEEDED
@pytest.mark.parametrize("query", commands("promql"))
def test_a_query_of_the_runbook_has_data(prometheus, query):
    """A comparison with an hour ago is only valid here: no server of a test is that old."""
    if "offset" in query:
        prometheus.query(query)
    else:
        assert prometheus.wait(lambda: prometheus.query(query), DATA_S), query


@NEEDED
def test_no_panel_of_the_dashboard_is_without_data(prometheus):
    panels = json.loads((ROOT / "docker" / "generated" / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    drawn = [query for panel in panels for query in queries(panel) if "$gateway" not in query]
    empty = [query.replace("$instance", ".+").replace("$__rate_interval", "1m") for query in drawn]
    assert len(drawn) > 50

    def shrink() -> bool:
        empty[:] = [query for query in empty if not prometheus.query(query)]
        return not empty

    assert prometheus.wait(shrink, DATA_S), empty


@NEEDED
def test_every_series_that_a_rule_reads_is_scraped(prometheus):
    """Also those that have not counted yet: an alert on a series that appears with its first event would miss it."""
    rules = (ROOT / "docker" / "generated" / "rules.yml").read_text(encoding="utf-8").replace('\\"', '"')
    selectors = set(re.findall(r'((?:tritonforge_\w+)\{[^}]*job="tritonforge"[^}]*\})', rules))
    assert len(selectors) > 15
    missing = [one for one in selectors if "_bucket" not in one and not prometheus.query(one)]
    assert not missing

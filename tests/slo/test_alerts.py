"""The alerts beside the real service: a campaign raises none of them, and each rehearsed fault its own and no other.

The rules are those of docker/generated, with their real waiting times, in a real Prometheus. A fault may break
promises, and so may a busy machine when the campaign says so; no other alert may fire.
"""

import os
import re
import signal
import subprocess
import sys

import pytest
from slo_prometheus import NEEDED, Prometheus
from slo_support import ROOT

from loadtests.rehearsals_stage import Crowd, request_of
from tritonforge.launch.ports import Ports
from tritonforge.launch.supervisor import State
from tritonforge.server import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, NEEDED]

GENERATED = ROOT / "docker" / "generated"
CONTRACT = ROOT / "loadtests" / "contracts" / "demo.toml"
PROMISES = {"TritonForgeSLOBurn", "TritonForgeSLOBroken"}
FIRES_S = 240.0
SEATS, PLACES = 32, 128
"""max_num_seqs and max_waiting of the release under test."""


@pytest.fixture
def watched(release_dir, tmp_path):
    """A server with the contract's buckets, and Prometheus with the contract's rules."""
    port = Ports(0, 0, 0).claim("127.0.0.1").http
    with (
        Server(release_dir, histogram_buckets=GENERATED / "histogram_buckets.json") as server,
        Prometheus(tmp_path, server.metrics_url, port, GENERATED / "rules.yml") as prometheus,
    ):
        yield server, prometheus


def test_a_campaign_raises_no_alert_and_gives_every_rule_its_data(watched, tmp_path):
    server, prometheus = watched
    command = [
        sys.executable,
        "loadtests/campaign.py",
        "--contract",
        CONTRACT,
        "--url",
        server.grpc_url,
        "--out",
        tmp_path,
    ]
    verdict = subprocess.run([*command, "--release", server.release.root], cwd=ROOT, capture_output=True, text=True)
    firing = prometheus.firing()
    assert not firing - PROMISES
    assert verdict.returncode != 0 or not firing, (firing, verdict.stdout)
    rules = (GENERATED / "rules.yml").read_text(encoding="utf-8").replace('\\"', '"')
    records = set(re.findall(r'record: "(\S+)"', rules))
    assert len(records) == 7 and all(prometheus.query(record) for record in records)
    for selector in set(re.findall(r'((?:tritonforge_\w+)\{[^}]*job="tritonforge"[^}]*\})', rules)):
        assert prometheus.query(selector), selector


def test_a_killed_stub_raises_the_alert_on_restarts_alone(watched):
    server, prometheus = watched
    prometheus.query("up")
    assert prometheus.wait(lambda: prometheus.query("tritonforge_restarts_total"), 30)
    os.kill(server.stub_pids()[0], signal.SIGKILL)
    assert prometheus.wait(lambda: "TritonForgeRestarted" in prometheus.firing(), FIRES_S)
    assert server.wait_for(State.SERVING, timeout_s=60) is State.SERVING
    assert prometheus.firing() - PROMISES == {"TritonForgeRestarted"}
    causes = {labels["cause"] for labels, _ in prometheus.query("tritonforge_restarts_total > 0")}
    assert causes == {"stub_died"}


def test_a_full_queue_raises_the_alerts_on_the_queue_alone(watched):
    """Long answers hold every seat, requests every place of the queue; somebody comes now and then and is refused."""
    server, prometheus = watched
    crowd, outside = Crowd(server.grpc_url, 600), Crowd(server.grpc_url, 60)
    for _ in range(SEATS):
        crowd.ask(request_of(max_tokens=1100))
    crowd.all_started()
    for _ in range(PLACES):
        crowd.ask(request_of(max_tokens=300))
    wanted = {"TritonForgeQueueFilling", "TritonForgeRefusing"}

    def refused_again() -> bool:
        outside.ask(request_of(max_tokens=1))
        return wanted <= prometheus.firing()

    assert prometheus.wait(refused_again, FIRES_S), prometheus.firing()
    assert prometheus.firing() - PROMISES == wanted


def test_a_server_that_is_gone_raises_the_alert_on_that_alone(watched):
    server, prometheus = watched
    server.stop(force=True)
    assert prometheus.wait(lambda: prometheus.firing() - PROMISES, FIRES_S)
    assert prometheus.firing() - PROMISES == {"TritonForgeDown"}

"""The exported rules beside the real server's metrics: every series that a rule reads is served, under that very label.

Wrong if it failed: alerts would be computed from nothing, or count every request as a miss.
"""

import json
import re
import time
import urllib.request

import pytest
import yaml
from slo_support import DOCUMENT, to_toml

from loadtests.export import main
from tritonforge.client import generate, infer_request
from tritonforge.gateway.accounting.edge_families import FAMILIES
from tritonforge.gateway.accounting.edge_families import PREFIX as EDGE
from tritonforge.server import Server

pytestmark = pytest.mark.server

SERIES = re.compile(r"rate\((\w+)\{([^}]*)\}")
SAMPLE = re.compile(r"^(tritonforge_\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)(=~?)"([^"]*)"')


def matches(selector: str, labels: dict[str, str]) -> bool:
    """Whether a sample with these labels is selected, as Prometheus does it."""
    return all(
        (re.fullmatch(wanted, labels.get(name, "")) if sign == "=~" else labels.get(name) == wanted)
        for name, sign, wanted in LABEL.findall(selector)
    )


def samples(server: Server) -> list[tuple[str, str, str]]:
    """(name, labels, value) of every sample of ours."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as answer:
        return SAMPLE.findall(answer.read().decode())


def test_every_series_of_the_rules_is_served_with_the_contracts_limits_as_bounds(release_dir, tmp_path):
    document = json.loads(json.dumps(DOCUMENT))
    for objective, limit in zip(document["profiles"][0]["objectives"], (3000, 87.5, 300, 1500), strict=False):
        objective["le"] = limit
    contract = tmp_path / "contract.toml"
    contract.write_text(to_toml(document))
    assert main(["--contract", str(contract), "--out", str(tmp_path / "out")]) == 0
    with Server(release_dir, histogram_buckets=tmp_path / "out" / "histogram_buckets.json") as server:
        request = infer_request("llm", text="Once upon a time", stream=True, max_tokens=8, ignore_eos=True)
        assert generate(server.grpc_url, request, 60).finish_reason == "length"
        deadline = time.monotonic() + 10
        while not any(name == "tritonforge_ttft_seconds_count" and float(n) for name, _, n in samples(server)):
            assert time.monotonic() < deadline, "the request never showed in the histograms"
        everything = samples(server)
    groups = yaml.safe_load((tmp_path / "out" / "rules.yml").read_text())["groups"]
    wanted = {found for group in groups for rule in group["rules"] for found in SERIES.findall(rule["expr"])}
    edge = {name for name, _ in wanted if name.startswith(EDGE)}
    assert len(wanted) - len(edge) > 8
    assert {re.sub("_(count|bucket|sum)$", "", name) for name in edge} <= {family.name for family in FAMILIES}
    for name, selector in wanted:
        if name in edge:  # another process serves these
            continue
        found = [{key: text for key, _, text in LABEL.findall(labels)} for one, labels, _ in everything if one == name]
        assert any(matches(selector, labels) for labels in found), f"{name}{{{selector}}} is not among {found}"

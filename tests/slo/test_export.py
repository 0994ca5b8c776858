"""What a contract exports: right in arithmetic, valid for promtool where there is one, nothing left out silently."""

import json
import os
import re
import shutil
import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from slo_support import to_toml

from loadtests.contract_toml import parse_contract
from loadtests.export import main
from loadtests.export_indicators import HISTOGRAMS, NO_METRIC, Indicator, histogram_buckets, indicators_of
from loadtests.export_openslo import documents
from loadtests.export_prometheus import burn_alerts, recordings, rules
from loadtests.export_yaml import to_yaml
from loadtests.metrics import METRICS

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
RATE = re.compile(r"\(sum\(rate\((?P<series>[^\[]*)\[(?P<window>\w+)\]\)\) or vector\(0\)\)")


def indicators(document, **options):
    contract = parse_contract(document)
    return indicators_of(contract, contract.profiles[0], **options)


def evaluate(expression: str, rates: dict[str, float]) -> float | None:
    """A recorded expression, with the rates of counters given by series; None where PromQL has no value."""
    numbers = RATE.sub(lambda found: str(rates.get(found["series"].replace(",}", "}"), 0.0)), expression)
    ratio = re.fullmatch(r"1 - ([\d.e-]+) / \((.*) > 0\)", numbers)
    assert ratio and re.fullmatch(r"[\d.e+\-() ]+", ratio[2]), numbers
    total = eval(ratio[2])
    return 1 - float(ratio[1]) / total if total > 0 else None


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_the_error_ratio_is_misses_over_issued_as_in_the_verdict(good, late, failed, refused):
    """Late, failed and refused are misses, and all of them are in the denominator."""
    from slo_support import DOCUMENT

    ttft = next(one for one in indicators(DOCUMENT).found if one.objective.id == "ttft")
    errors = next(one for one in indicators(DOCUMENT).found if one.objective.id == "errors")
    rates = {
        'tritonforge_ttft_seconds_bucket{le="0.3"}': good,
        "tritonforge_ttft_seconds_count{}": good + late,
        'tritonforge_num_requests_finished_total{finish_reason="error"}': failed,
        'tritonforge_num_requests_finished_total{finish_reason=~"stop|length"}': good + late,
        "tritonforge_num_requests_refused_total{}": refused,
    }
    issued = good + late + failed + refused
    for one, misses in ((ttft, late + failed + refused), (errors, failed + refused)):
        for record in recordings(one):
            found = evaluate(record["expr"], rates)
            assert found is None if issued == 0 else found == pytest.approx(misses / issued)


def test_every_window_of_an_alert_is_recorded(document):
    found = indicators(document)
    recorded = {(r["record"], r["labels"]["slo"]) for one in found.found for r in recordings(one)}
    for one in found.found:
        for alert in burn_alerts(one):
            used = re.findall(r'(tritonforge_slo:\S+?)\{slo="([^"]+)"\}', alert["expr"])
            assert len(used) == 2 and set(used) <= recorded


@given(st.sampled_from([0.5, 0.75, 0.9, 0.95, 0.99, 0.999]))
def test_no_alert_waits_for_more_errors_than_there_are_requests(quantile):
    """14.4 times a budget of 10% is no error ratio: an alert on it could never fire."""
    from slo_support import DOCUMENT

    document = json.loads(json.dumps(DOCUMENT))
    document["profiles"][0]["objectives"][0]["quantile"] = quantile
    one = indicators(document).found[0]
    limits = [eval(part) for alert in burn_alerts(one) for part in re.findall(r"> ([\d.]+ \* [\d.]+)", alert["expr"])]
    assert limits and all(0 < limit < 1 for limit in limits)
    assert len(limits) == 2 * sum(burn * (1 - quantile) < 1 for burn in (14.4, 6, 3, 1))


def test_a_promise_for_every_request_is_an_alert_without_a_budget(document):
    document["profiles"][0]["objectives"][2]["quantile"] = 1.0
    found = indicators(document)
    text = json.dumps(rules(found))
    assert "TritonForgeSLOBroken" in text and "tritonforge_max_stall_seconds_bucket" in text
    assert "test/small/stall" not in [r["labels"].get("slo") for r in rules(found)["groups"][0]["rules"]]
    assert "small-stall" not in json.dumps(list(documents(found)))


def test_every_objective_is_exported_or_left_with_a_reason(document):
    found = indicators(document)
    names = [one.objective.id for one in found.found] + [left.objective for left in found.left]
    assert sorted(names) == sorted(o["id"] for o in document["profiles"][0]["objectives"])
    assert {left.objective for left in found.left} == {"goodput", "rate"}
    assert set(METRICS) >= {*HISTOGRAMS, *NO_METRIC}


def test_a_promise_of_one_phase_among_several_is_left_out(document):
    document["profiles"][0]["arrivals"]["phases"].append({"name": "peak", "rate": 80.0, "seconds": 2})
    document["profiles"][0]["objectives"][0]["phase"] = "peak"
    left = {one.objective: one.reason for one in indicators(document).left}
    assert "phase 'peak' only" in left["ttft"]


def test_every_limit_is_a_bucket_boundary_and_its_label_is_the_one_that_triton_writes(document):
    """Wrong: a label that no bucket has, so that every request counts as a miss. Golden: Triton 2.51's labels."""
    document["profiles"][0]["objectives"][0]["le"] = 3000
    document["profiles"][0]["objectives"][1]["le"] = 87.5
    buckets = histogram_buckets(parse_contract(document))
    assert 0.0875 in buckets["tritonforge_tpot_seconds"] and 3.0 in buckets["tritonforge_ttft_seconds"]
    assert all(found == sorted(set(found)) for found in buckets.values())
    text = json.dumps(rules(indicators(document))).replace('\\"', '"')
    assert set(re.findall(r'tpot_seconds_bucket{le(=~?"[^"]+")}', text)) == {'="0.08749999999999999"'}
    whole = re.findall(r'ttft_seconds_bucket{le=~"([^"]+)"}', text)
    assert set(whole) == {"3([.]0)?"} and all(re.fullmatch(whole[0], label) for label in ("3", "3.0"))


def test_openslo_documents_refer_only_to_what_they_define(document):
    found = list(documents(indicators(document)))
    kinds = [one["kind"] for one in found]
    assert kinds.count("SLO") == 5 and kinds.count("Service") == kinds.count("DataSource") == 1
    names = {(one["kind"], one["metadata"]["name"]) for one in found}
    assert len(names) == len(found), "names are distinct"
    for kind, name in names:
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name), (kind, name)
    for slo in (one["spec"] for one in found if one["kind"] == "SLO"):
        assert ("Service", slo["service"]) in names
        assert {("AlertPolicy", ref["alertPolicyRef"]) for ref in slo["alertPolicies"]} <= names
        ratio = slo["indicator"]["spec"]["ratioMetric"]
        assert {("DataSource", ratio[side]["metricSource"]["metricSourceRef"]) for side in ("good", "total")} <= names
        assert "{window}" not in json.dumps(ratio) and "rate(" not in json.dumps(ratio)
        assert 0 < slo["objectives"][0]["target"] < 1 and slo["budgetingMethod"] == "Occurrences"
    for policy in (one["spec"] for one in found if one["kind"] == "AlertPolicy"):
        assert len(policy["conditions"]) == 1 and policy["notificationTargets"]


text = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)
values = st.recursive(
    st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6).map(lambda x: round(x, 3)) | text,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]{1,6}x", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(
    st.lists(
        st.dictionaries(st.from_regex(r"[a-z]{1,6}x", fullmatch=True), values, min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_written_yaml_reads_as_the_same_documents(found):
    assert list(yaml.safe_load_all(to_yaml(found))) == found


def test_the_command_writes_three_files_and_says_what_it_left_out(tmp_path, document, capsys):
    contract = tmp_path / "c.toml"
    contract.write_text(to_toml(document))
    assert main(["--contract", str(contract), "--out", str(tmp_path / "out"), "--job", 'a"b']) == 0
    said = capsys.readouterr().out
    assert "not exported: goodput: " in said and "5 of 7 objectives exported" in said
    found = yaml.safe_load((tmp_path / "out" / "rules.yml").read_text())
    assert 'job="a\\"b"' in found["groups"][0]["rules"][0]["expr"]
    assert "TritonForgeDown" in json.dumps(found)
    assert json.loads((tmp_path / "out" / "histogram_buckets.json").read_text())["tritonforge_ttft_seconds"]
    assert main(["--contract", str(tmp_path / "none.toml"), "--out", str(tmp_path / "x")]) == 2


def _series(name: str, per_minute: float, minutes: int) -> dict:
    return {"series": name, "values": f"0+{per_minute:g}x{minutes}"}


def _fires(one: Indicator, pairs: list[str]) -> list[dict]:
    return [
        {
            "exp_labels": {**{k: a["labels"][k] for k in ("severity", "slo", "windows")}},
            "exp_annotations": {},
        }
        for a in burn_alerts(one)
        if a["labels"]["windows"] in pairs
    ]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: package prometheus)")
@pytest.mark.parametrize(
    ("late_share", "pairs"),
    [(0.0, []), (0.04, []), (0.08, ["6h/3d"]), (0.2, ["2h/1d", "6h/3d"]), (0.8, ["5m/1h", "30m/6h", "2h/1d", "6h/3d"])],
)
def test_prometheus_itself_fires_the_alerts_that_the_burn_rate_asks_for(tmp_path, document, late_share, pairs):
    """p95: a budget of 5%, which 8% late requests burn 1.6 times too fast, 20% four times, 80% sixteen times."""
    document["profiles"][0]["objectives"] = document["profiles"][0]["objectives"][:1]
    found = indicators(document)
    stripped = rules(found)
    for rule in stripped["groups"][1]["rules"]:
        rule.pop("annotations")
    (tmp_path / "rules.yml").write_text(to_yaml([stripped]))
    minutes = 3 * 24 * 60 + 10
    good = _series('tritonforge_ttft_seconds_bucket{le="0.3",instance="a"}', 100 * (1 - late_share), minutes)
    every = _series('tritonforge_ttft_seconds_count{instance="a"}', 100, minutes)
    finished = _series('tritonforge_num_requests_finished_total{finish_reason="length"}', 100, minutes)
    test = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "30m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [good, every, finished],
                "alert_rule_test": [
                    {"eval_time": "3d", "alertname": "TritonForgeSLOBurn", "exp_alerts": _fires(found.found[0], pairs)},
                    {"eval_time": "3d", "alertname": "TritonForgeMetricsAbsent", "exp_alerts": []},
                ],
            }
        ],
    }
    if not pairs:
        test["tests"][0]["alert_rule_test"][0].pop("exp_alerts")
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [PROMTOOL, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: package prometheus)")
def test_promtool_accepts_the_rules_of_a_contract(tmp_path, document):
    document["profiles"][0]["objectives"][2]["quantile"] = 1.0
    (tmp_path / "rules.yml").write_text(to_yaml([rules(indicators(document, job="triton"))]))
    done = subprocess.run(
        [PROMTOOL, "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr

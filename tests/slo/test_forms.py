"""The verdict in other forms: JUnit, Markdown, a difference of two runs, an explanation, a baseline."""

import json
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from slo_support import SECOND, change_part, delayed, failing, make_run, to_toml
from test_records import write_shards

from loadtests import campaign
from loadtests.explain import explain
from loadtests.exports_text import junit, markdown
from loadtests.fields import InvalidContract
from loadtests.regression import BETTER, SAME, WORSE, baseline_of, compare, not_compared, regressions, table_of
from loadtests.report import build_report
from loadtests.verdict import judge


def report_on(contract, run):
    return build_report(contract, run, judge(contract, run))


def cases(contract, run) -> dict[str, str]:
    """What each test case of the JUnit file holds beside its output."""
    root = ET.fromstring(junit(report_on(contract, run)))
    found = {}
    for case in root.iter("testcase"):
        kinds = [child.tag for child in case if child.tag != "system-out"]
        found[case.get("name")] = kinds[0] if kinds else "passed"
    return found


def test_each_objective_is_a_test_case(contract):
    """Wrong: a CI would show a green build for a broken promise."""
    assert set(cases(contract, make_run(contract)).values()) == {"passed"}
    found = cases(contract, make_run(contract, lambda r: failing(r) if r.index % 3 == 0 else r))
    assert found["ttft"] == "failure"
    assert found["the measurement can be trusted"] == "passed"
    few = cases(contract, make_run(contract, lambda r: failing(r) if r.index in (20, 40, 60) else r))
    assert few["ttft"] == "skipped"
    lost = cases(contract, change_part(make_run(contract), shards=()))
    assert set(lost.values()) == {"error"}, "where the measurement is broken, nothing has passed"
    root = ET.fromstring(junit(report_on(contract, change_part(make_run(contract), shards=()))))
    suite = root.find("testsuite")
    assert (suite.get("errors"), suite.get("failures"), suite.get("tests")) == ("8", "0", "8")


def test_markdown_says_verdict_reason_and_numbers(contract):
    text = markdown(report_on(contract, make_run(contract, lambda r: failing(r) if r.index % 3 == 0 else r)))
    assert text.startswith("## FAIL: test revision 1")
    assert "| ttft | p95 ttft <= 300 ms | unbounded |" in text
    assert "- small: ttft: " in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1, "a cell broke its row"


def test_a_difference_is_told_only_when_it_is_proven(contract):
    """Wrong: every second comparison of a release with itself would find a regression."""
    spread = lambda r: delayed(r, r.index % 7)  # noqa: E731
    other = lambda r: delayed(r, (r.index + 3) % 7)  # noqa: E731
    slower = lambda r: delayed(r, r.index % 7 + 20)  # noqa: E731
    base = make_run(contract, spread)
    same = {d.metric: d.outcome for d in compare(contract, base, make_run(contract, other))}
    assert set(same.values()) == {SAME}
    worse = {d.metric: d for d in compare(contract, base, make_run(contract, slower))}
    assert (worse["ttft_ms p95"].outcome, worse["tpot_ms p95"].outcome) == (WORSE, SAME)
    assert worse["ttft_ms p95"].low > 1
    better = {d.metric: d.outcome for d in compare(contract, make_run(contract, slower), base)}
    assert better["ttft_ms p95"] == BETTER


def test_runs_of_other_contracts_are_not_compared(contract):
    run = make_run(contract)
    with pytest.raises(InvalidContract, match="both runs must be of one contract"):
        compare(contract, run, replace(run, header={**run.header, "contract_sha256": "other"}))


def test_an_explanation_names_the_phase_that_made_requests_late(contract):
    """Wrong: people would look for a slow prefill where the queue was long."""
    text = explain(contract, make_run(contract, lambda r: delayed(r, 400) if r.index % 3 == 0 else r), "small.ttft")
    assert text.startswith("small.ttft (p95 ttft <= 300 ms): FAIL. ttft: ")
    assert "dominant: queue, 400.00 ms more than the requests that met the limit" in text

    def slow_prefill(record):
        if record.index % 3:
            return record
        moved = delayed(record, 400)
        statistics = {**record.statistics, "prefill_us": record.statistics["prefill_us"] + 400_000}
        return replace(moved, statistics=statistics)

    assert "dominant: prefill" in explain(contract, make_run(contract, slow_prefill), "small.ttft")
    passed = explain(contract, make_run(contract), "small.ttft")
    assert "dominant" not in passed
    with pytest.raises(InvalidContract, match=r"objective must be one of small's \(ttft, tpot"):
        explain(contract, make_run(contract), "small.none")


def test_a_baseline_forgives_noise_and_names_what_got_worse(contract):
    spread = lambda r: delayed(r, r.index % 7)  # noqa: E731
    base = baseline_of(contract, make_run(contract, spread))
    now = baseline_of(contract, make_run(contract, lambda r: delayed(r, r.index % 7 + 20)))
    assert regressions(base, base, 0.0) == []
    assert (
        regressions(base, baseline_of(contract, make_run(contract, lambda r: delayed(r, 3 + r.index % 5))), 0.1) == []
    )
    (sentence,) = [text for text in regressions(base, now, 0.1) if "ttft" in text]
    assert sentence.startswith("small: p95 ttft_ms is 57")
    assert regressions(base, now, 1.0) == [], "twice as much was allowed"
    with pytest.raises(InvalidContract, match="baseline must be of this contract"):
        regressions({**base, "contract_sha256": "x"}, now, 0.1)


@pytest.fixture
def runs(contract, document, tmp_path):
    """Two run folders on disk, the second 20 ms slower, and their contract."""
    from test_records import write_shards

    folders = []
    for name, change in (("a", lambda r: delayed(r, r.index % 7)), ("b", lambda r: delayed(r, r.index % 7 + 20))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "contract.toml").write_text(to_toml(document))
        write_shards(folder, contract, make_run(contract, change))
        folders.append(folder)
    return folders


def test_the_command_line_compares_explains_and_keeps_baselines(runs, capsys):
    first, second = (str(folder / "raw.jsonl") for folder in runs)
    baseline = str(runs[0] / "baseline.json")
    assert campaign.main(["--recompute", first, "--write-baseline", baseline]) == 0
    assert campaign.main(["--recompute", first, "--baseline", baseline]) == 0
    assert campaign.main(["--recompute", second, "--baseline", baseline]) == 1
    assert "regression: small: p95 ttft_ms" in capsys.readouterr().out
    assert campaign.main(["--diff", first, second]) == 1
    assert "worse" in capsys.readouterr().out
    assert campaign.main(["--diff", second, first]) == 0
    assert campaign.main(["--recompute", first, "--explain", "small.ttft"]) == 0
    assert "small.ttft (p95 ttft <= 300 ms): PASS" in capsys.readouterr().out
    assert campaign.main(["--recompute", first, "--explain", "other.ttft"]) == 2
    (runs[0] / "bad.json").write_text(json.dumps({"schema": "x"}))
    assert campaign.main(["--recompute", first, "--baseline", str(runs[0] / "bad.json")]) == 2
    assert {"junit.xml", "report.md", "report.json", "report.html"} <= {path.name for path in runs[0].iterdir()}


def test_a_run_in_which_requests_fail_is_no_better_one(contract):
    """Wrong: the answers that never came would be left out, and the rest look faster."""
    base = make_run(contract, lambda r: delayed(r, 200) if r.index % 4 == 0 else r)
    failed = make_run(contract, lambda r: failing(r) if r.index % 4 == 0 else r)
    found = {d.metric: d for d in compare(contract, base, failed)}
    assert found["error_ratio"].outcome == WORSE
    assert found["ttft_ms p95"].outcome == WORSE
    assert "unbounded" in table_of(list(found.values()))
    none = {d.metric: d.outcome for d in compare(contract, base, make_run(contract, failing))}
    assert none == {name: WORSE for name in none}
    sides = [baseline_of(contract, run) for run in (base, failed)]
    (sentence,) = [text for text in regressions(*sides, 0.1) if "ttft" in text]
    assert "is unbounded" in sentence


def test_an_invalid_measurement_is_compared_with_nothing(contract, document, tmp_path, capsys):
    """Wrong: a client that was late would be read as a service that got slower, or kept as what it should be."""
    run = make_run(contract)
    late = replace(run.profiles[0].shards[0], lag_ns=(SECOND,) * 40)
    broken = change_part(run, shards=(late,))
    (tmp_path / "contract.toml").write_text(to_toml(document))
    raws = []
    for name, each in (("good", run), ("bad", broken)):
        (tmp_path / name).mkdir()
        raws.append(str(write_shards(tmp_path / name, contract, each)))
    given = ["--contract", str(tmp_path / "contract.toml")]
    assert campaign.main(["--diff", *raws, *given]) == 3
    assert "not compared: small: the measurement is invalid: " in capsys.readouterr().out
    kept = baseline_of(contract, broken)
    assert kept["profiles"] == {}
    assert [text.partition(": the")[0] for text in not_compared(baseline_of(contract, run), kept)] == ["small"]
    assert not_compared(kept, baseline_of(contract, run)) == ["small: the baseline has none"]
    nothing = baseline_of(contract, replace(run, profiles=(), header={**run.header, "profiles": []}))
    assert not_compared(baseline_of(contract, run), nothing) == ["small: was not run"]
    assert explain(contract, broken, "small.ttft").startswith("INVALID measurement: lag: ")
    capsys.readouterr()
    file = tmp_path / "b.json"
    file.write_text(json.dumps({**baseline_of(contract, run), "profiles": {"small": {"ttft_ms": {"value": "fast"}}}}))
    assert campaign.main(["--recompute", raws[0], *given, "--baseline", str(file)]) == 2
    assert "profiles.small.ttft_ms.value must be a number" in capsys.readouterr().err

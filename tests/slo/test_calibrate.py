"""What the load generator adds is measured against a server that says when it sent each response."""

import json

from slo_support import to_toml

from loadtests import calibrate
from loadtests.contract_toml import load_contract
from loadtests.lint import lint


def test_the_calibrations_contract_is_one(tmp_path):
    (tmp_path / "c.toml").write_text(to_toml(calibrate.document(1000.0, 5.0)))
    contract = load_contract(tmp_path / "c.toml")
    assert lint(contract, contract.profiles[0])
    arrivals = contract.profiles[0].arrivals
    assert sum(p.rate * calibrate.TOKENS for p in arrivals.phases if p.measured) == 1000.0


def test_a_calibration_sees_every_response_after_it_was_sent(tmp_path, capsys):
    """Wrong: a response would be stamped before it was sent, or the slow ones would be left out."""
    given = ["--tokens-per-s", "200", "--seconds", "2", "--limit-ms", "60000", "--out", str(tmp_path)]
    assert calibrate.main(given) == 0
    found = json.loads((tmp_path / "calibration.json").read_text())
    assert found["responses"] == 400
    assert 0 < found["p50_ms"] <= found["p95_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert 0 < found["client_cpu"] <= 1.05
    assert "of one core (400 responses)" in capsys.readouterr().out

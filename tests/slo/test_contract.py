"""Contracts are read strictly, hashed by meaning, and refused when no run could decide them."""

import pytest
from slo_support import ROOT, to_toml

from loadtests.contract_toml import load_contract, parse_contract
from loadtests.fields import InvalidContract
from loadtests.runs import lint, shortest

SHIPPED = sorted((ROOT / "loadtests" / "contracts").glob("*.toml"))


def at(document, path):
    for key in path[:-1]:
        document = document[key]
    return document


@pytest.mark.parametrize(
    "path",
    [
        ("surprise",),
        ("target", "surprise"),
        ("measurement", "surprise"),
        ("profiles", 0, "surprise"),
        ("profiles", 0, "arrivals", "surprise"),
        ("profiles", 0, "arrivals", "phases", 1, "surprise"),
        ("profiles", 0, "prompt_tokens", "surprise"),
        ("profiles", 0, "objectives", 0, "surprise"),
    ],
)
def test_unknown_keys_are_refused_by_name(document, path):
    """Wrong: a misspelt limit would silently not be checked."""
    at(document, path)["surprise"] = 1
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
    with pytest.raises(InvalidContract) as error:
        parse_contract(document)
    assert f"{where}: unknown key" in str(error.value)


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        (("schema",), "tritonforge.contract/2", "schema must be one of tritonforge.contract/1, got"),
        (("revision",), True, r"revision must be an integer in \[1,"),
        (("definitions",), {"latency_origin": "sent"}, "latency_origin must be one of scheduled, got 'sent'"),
        (("statistics",), {"confidence": 1.5}, "statistics.confidence must be a number in"),
        (("measurement", "client_cpu_max"), "lots", "measurement.client_cpu_max must be a number"),
        (("profiles",), [], "profiles must hold at least one profile"),
        (("profiles", 0, "arrivals", "process"), "closed", "process must be one of poisson, constant, gamma"),
        (("profiles", 0, "arrivals", "phases", 1, "rate"), 0, r"phases\[1\].rate must be a number in \(0,"),
        (("profiles", 0, "arrivals", "phases", 1, "measured"), False, "at least one measured phase"),
        (("profiles", 0, "objectives", 0, "metric"), "ttft", "metric must be one of ttft_ms"),
        (("profiles", 0, "objectives", 0, "quantile"), 1.5, "quantile must be a number"),
        (("profiles", 0, "objectives", 0, "quantile"), 0.999999, "quantile must be at most 0.99999, or 1.0"),
        (("profiles", 0, "id"), "small.b", r"profiles\[0\].id must match"),
        (("profiles", 0, "id"), "s*", r"profiles\[0\].id must match"),
        (("name",), "../elsewhere", "name must match"),
        (("profiles", 0, "objectives", 0, "le"), float("nan"), "le must be a number"),
        (
            ("profiles", 0, "objectives", 0, "phase"),
            "warmup",
            r"phase must be a measured phase \(steady\), got 'warmup'",
        ),
        (("profiles", 0, "objectives", 1, "id"), "ttft", "distinct names, got 'ttft' twice"),
        (("profiles", 0, "objectives", 4, "le"), 0.0, "no number of samples proves 0"),
        (("profiles", 0, "prompt_tokens"), {"dist": "uniform", "min": 9, "max": 3}, r"max must be an integer in \[9,"),
    ],
)
def test_bad_values_are_refused_with_their_rule(document, path, value, rule):
    at(document, path)[path[-1]] = value
    with pytest.raises(InvalidContract, match=rule):
        parse_contract(document)


@pytest.mark.parametrize("path", [("name",), ("profiles", 0, "data", "seed"), ("profiles", 0, "objectives", 0, "le")])
def test_missing_values_are_named(document, path):
    del at(document, path)[path[-1]]
    with pytest.raises(InvalidContract, match=rf"{path[-1]} is missing"):
        parse_contract(document)


def test_the_hash_is_of_the_meaning(document, tmp_path):
    """Wrong: a comment would make it another contract, or a changed limit would not."""
    plain = parse_contract(document)
    file = tmp_path / "c.toml"
    shuffled = dict(reversed(document.items())) | {"statistics": {"confidence": 0.95}}
    file.write_text("# a comment\n" + to_toml(shuffled))
    assert load_contract(file).sha256 == plain.sha256
    document["profiles"][0]["objectives"][0]["le"] = 301
    assert parse_contract(document).sha256 != plain.sha256


def test_undecidable_objectives_are_refused(document):
    """Wrong: a campaign would run for minutes and could only end undecided."""
    document["profiles"][0]["objectives"][0]["quantile"] = 0.99
    contract = parse_contract(document)
    with pytest.raises(InvalidContract, match=r"small\.ttft needs at least 299 requests"):
        lint(contract, contract.profiles[0])
    document["profiles"][0]["objectives"][0]["quantile"] = 0.95
    document["profiles"][0]["output_tokens"] = {"dist": "constant", "value": 1}
    contract = parse_contract(document)
    with pytest.raises(InvalidContract, match=r"small\.tpot needs output_tokens of at least 2"):
        lint(contract, contract.profiles[0])


def test_no_request_may_exceed_a_limit_of_every(document):
    """Wrong: lint would ask for endless samples, or let a run of a few pass as a proof."""
    document["profiles"][0]["objectives"][0]["quantile"] = 1.0
    contract = parse_contract(document)
    assert shortest(contract, contract.profiles[0].objectives[0]) == 59
    lint(contract, contract.profiles[0])


def test_files_that_are_no_contracts(tmp_path):
    with pytest.raises(InvalidContract, match="cannot be read"):
        load_contract(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(InvalidContract, match="is not TOML"):
        load_contract(tmp_path / "bad.toml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_contracts_can_be_decided(path):
    contract = load_contract(path)
    for profile in contract.profiles:
        lint(contract, profile)
        assert all(shortest(contract, objective) >= 1 for objective in profile.objectives)

"""Exports a contract to what watches production: Prometheus rules, a Grafana dashboard, OpenSLO, histogram buckets.

    python loadtests/export.py --contract loadtests/contracts/demo.toml --out artifacts/export [--job tritonforge]

Writes rules.yml, operator/prometheusrule.yml (the same for the Prometheus operator), dashboard.json, openslo.yml and
histogram_buckets.json. What cannot be exported is said, with the reason.
Exit codes: 0 written, 2 usage or contract error.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not this folder: its modules are `loadtests.x`

from loadtests.capacity_contract import choose_profile  # noqa: E402
from loadtests.contract_toml import load_contract  # noqa: E402
from loadtests.exits import refuse  # noqa: E402
from loadtests.export_grafana import dashboard  # noqa: E402
from loadtests.export_indicators import Indicators, histogram_buckets, indicators_of  # noqa: E402
from loadtests.export_openslo import documents  # noqa: E402
from loadtests.export_prometheus import operator_rule, rules  # noqa: E402
from loadtests.export_yaml import to_yaml  # noqa: E402
from loadtests.fields import InvalidContract  # noqa: E402


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contract", type=Path, required=True, help="contract file (TOML)")
    parser.add_argument("--profile", help="the profile that production resembles, when the contract has several")
    parser.add_argument("--job", help="the Prometheus job that scrapes the servers; adds an alert on servers down")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Write the files and say what is in them."""
    options = parse_args(arguments)
    try:
        contract = load_contract(options.contract)
        found = indicators_of(contract, choose_profile(contract, options.profile), job=options.job)
        if not found.found:
            raise InvalidContract(f"{found.profile.id} has no objective that production metrics carry")
        write(found, options.out)
    except Exception as error:
        return refuse(error)
    for left in found.left:
        print(f"not exported: {left.objective}: {left.reason}")
    print(f"{len(found.found)} of {len(found.profile.objectives)} objectives exported to {options.out}")
    return 0


def write(found: Indicators, out: Path) -> None:
    """The five files."""
    contract = found.contract
    head = f"# Contract {contract.name} revision {contract.revision}, profile {found.profile.id}."
    lines = [
        head,
        f"# sha256 {contract.sha256}",
        *(f"# Not exported: {left.objective}: {left.reason}." for left in found.left),
        "",
    ]
    (out / "operator").mkdir(parents=True, exist_ok=True)
    resources = {
        "rules.yml": [rules(found)],
        "operator/prometheusrule.yml": [operator_rule(found)],
        "openslo.yml": documents(found),
    }
    for name, resource in resources.items():
        (out / name).write_text("\n".join(lines) + to_yaml(resource), encoding="utf-8")
    panels = json.dumps(dashboard(found), indent=2, ensure_ascii=False) + "\n"
    (out / "dashboard.json").write_text(panels, encoding="utf-8")
    buckets = json.dumps(histogram_buckets(contract), indent=2) + "\n"
    (out / "histogram_buckets.json").write_text(buckets, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

"""Whole campaigns against a stub: what runs one, and what it leaves behind."""

import copy
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from slo_stub import Behaviour, Stub
from slo_support import DOCUMENT, ROOT, to_toml

from loadtests.campaign import main

CAMPAIGN = str(ROOT / "loadtests" / "campaign.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@dataclass
class Outcome:
    """What a campaign left behind."""

    exit_code: int
    folder: Path
    stub: Stub

    @property
    def report(self) -> dict:
        return json.loads((self.folder / "report.json").read_text())

    @property
    def profile(self) -> dict:
        return self.report["profiles"][0]

    def objective(self, name: str) -> dict:
        return next(row for row in self.profile["objectives"] if row["id"] == name)

    def broken(self) -> set[str]:
        return {check["name"] for check in self.profile["checks"] if check["ok"] is False}


def arguments(contract: Path, tokenizer: Path, out: Path) -> list[str]:
    return ["--contract", str(contract), "--tokenizer", str(tokenizer), "--out", str(out)]


def run_campaign(folder: Path, tokenizer: Path, behaviour: Behaviour, document: dict) -> Outcome:
    folder.mkdir(exist_ok=True)
    contract = folder / "given.toml"
    contract.write_text(to_toml(document))
    with Stub(behaviour) as stub:
        code = main([*arguments(contract, tokenizer, folder), "--url", stub.url, "--http-url", stub.http_url])
        time.sleep(0.2)
        return Outcome(code, folder, stub)


def document_with(*, rate=40.0, seconds=2.5, **profile) -> dict:
    document = copy.deepcopy(DOCUMENT)
    document["measurement"]["schedule_lag_p99_ms"] = 2000  # several campaigns share two cores here
    document["profiles"][0]["arrivals"]["phases"][1] |= {"rate": rate, "seconds": seconds}
    document["profiles"][0] |= profile
    return document

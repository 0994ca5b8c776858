"""Runs the trials of a capacity search: a derived contract, a whole campaign, its report read back.

Capacity and sweep use it. The campaign runs in a process of its own, as a person would start it; its output is kept
beside its records.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.capacity_contract import at_rate
from loadtests.capacity_search import Trial
from loadtests.capacity_toml import to_toml
from loadtests.exits import INTERRUPTED, UNREACHABLE, USAGE
from loadtests.fields import InvalidContract
from loadtests.target import Unreachable
from tritonforge.client import generate, infer_request
from tritonforge.errors import Overloaded, TritonForgeError

CAMPAIGN = Path(__file__).with_name("campaign.py")
SETTLE_S = 180.0
"""What a server gets to answer one token after an overload, before the next trial."""
RETRY_S = 0.5


@dataclass
class Trials:
    """The trials of one search on one served release. Each gets a folder of `out` and arrivals of its own.

    `tell` is called with a line of progress.
    """

    document: dict[str, Any]
    profile: str
    model: str
    url: str
    out: Path
    release: Path | None
    tokenizer: Path | None
    seed: int
    min_seconds: float
    tell: Any = print
    count: int = field(default=0, init=False)

    def __call__(self, rate: float, purpose: str, longer: float) -> Trial:
        """Run one trial. Raises InvalidContract, Unreachable or the campaign's own complaint as one of them."""
        self.count += 1
        folder = self.out / f"{self.count:02d}-{rate:g}"
        folder.mkdir(parents=True, exist_ok=True)
        seed, least = self.seed + 1000 * self.count, self.min_seconds
        document = at_rate(self.document, self.profile, rate, seed=seed, min_seconds=least, longer=longer)
        contract = folder / "contract.toml"
        contract.write_text(to_toml(document), encoding="utf-8")
        self.settle()
        self._campaign(contract, folder)
        trial = read_trial(folder, rate, purpose)
        self.tell(line(trial))
        return trial

    def settle(self) -> None:
        """Return once the server generates again: what an overloaded trial left in its queue is gone by then."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                generate(self.url, infer_request(self.model, text="Hello", max_tokens=1), SETTLE_S)
                return
            except TritonForgeError as error:
                if not isinstance(error, Overloaded) or time.monotonic() > deadline:
                    raise Unreachable(f"model {self.model} at {self.url} does not generate: {error}") from None
            time.sleep(RETRY_S)

    def _campaign(self, contract: Path, folder: Path) -> None:
        command = [sys.executable, str(CAMPAIGN), "--contract", str(contract), "--url", self.url, "--out", str(folder)]
        command += ["--release", str(self.release)] if self.release else []
        command += ["--tokenizer", str(self.tokenizer)] if self.tokenizer else []
        (folder / "report.json").unlink(missing_ok=True)  # an earlier search's: it must not pass for this one's
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        (folder / "campaign.log").write_text(done.stdout, encoding="utf-8")
        if done.returncode == INTERRUPTED:
            raise KeyboardInterrupt
        if done.returncode in (USAGE, UNREACHABLE) or not (folder / "report.json").is_file():
            last = done.stdout.strip().splitlines()[-1:] or [f"ended with code {done.returncode}"]
            error = Unreachable if done.returncode == UNREACHABLE else InvalidContract
            raise error(f"the trial in {folder} did not run: {last[0]}")


def read_trial(folder: Path, rate: float, purpose: str) -> Trial:
    """The trial that a campaign left in `folder`."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    part = report["profiles"][0]
    spread, load = part["distributions"], part["load"]
    return Trial(
        rate=rate,
        purpose=purpose,
        status=report["verdict"]["status"],
        requests=spread["ttft_ms"]["n"] + sum(part["errors"].values()),
        achieved_rps=load["achieved_rps"],
        output_tokens_per_s=load["output_tokens_per_s"],
        in_flight=load["in_flight"]["mean"],
        e2e_p50_ms=spread["e2e_ms"]["p50"],
        ttft_p95_ms=spread["ttft_ms"]["p95"],
        tpot_p95_ms=spread["tpot_ms"]["p95"],
        reasons=tuple(report["verdict"]["reasons"]),
        objectives=tuple(part["objectives"]),
        folder=str(folder),
    )


def line(trial: Trial) -> str:
    """One trial in one line."""
    parts = [f"{trial.rate:>7g}/s {trial.status:<12} {trial.requests:>5} requests"]
    parts.append(f"{trial.output_tokens_per_s:>8.1f} tok/s  {trial.in_flight:>5.1f} in flight")
    for name, value in (("TTFT", trial.ttft_p95_ms), ("TPOT", trial.tpot_p95_ms)):
        parts.append(f"{name} p95 {'-' if value is None else format(value, '.1f'):>8} ms")
    why = f"  {trial.reasons[0]}" if trial.reasons and not trial.holds else ""
    return "  ".join(parts) + f"  ({trial.purpose}){why}"

"""Judges a canary by its contract, on the requests it really got: from the decoder's own metrics of its version.

`tritonforge release promote --contract` asks it. The promises, what carries them and the statistics are those of the
exports and of the campaigns; what production metrics cannot carry is said and not judged.
"""

import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loadtests.binomial import FAIL, INCONCLUSIVE, PASS, compliance_bounds, decide, samples_needed
from loadtests.capacity_contract import choose_profile
from loadtests.contract import EVERY, Contract, Objective, Profile
from loadtests.contract_toml import load_contract
from loadtests.export_indicators import FINISHED, HISTOGRAMS, PREFIX, REFUSED, boundary, why_not
from loadtests.fields import InvalidContract
from loadtests.judges import shares_claim
from loadtests.metrics import DURATION, METRICS
from tritonforge.errors import SetupError

EXIT = {PASS: 0, FAIL: 1, INCONCLUSIVE: 3}
TIMEOUT_S = 10.0
_SAMPLE = re.compile(r"^(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Labels = frozenset[tuple[str, str]]
Series = Mapping[tuple[str, Labels], float]


@dataclass(frozen=True)
class Judged:
    """One promise: how many of the canary's requests broke it, and what that proves."""

    objective: Objective
    status: str
    n: int
    misses: int


def run(contract_file: Path, profile_name: str | None, metrics_url: str, version: int) -> int:
    """Judge the version by its metrics, say how, and return 0 (kept), 1 (broken) or 3 (not decided yet)."""
    contract = load_contract(contract_file)
    profile = choose_profile(contract, profile_name)
    judged, left = judge(contract, profile, scrape(metrics_url, version))
    for one in judged:
        print(_line(contract, one))
    for name, reason in left.items():
        print(f"  {name:20} not judged: {reason}")
    verdict = worst(judged)
    print(f"canary, version {version}: {verdict} by {contract.name} revision {contract.revision}, profile {profile.id}")
    return EXIT[verdict]


def judge(contract: Contract, profile: Profile, series: Series) -> tuple[list[Judged], dict[str, str]]:
    """Every promise that metrics carry, judged, and why the others are not. `series` are those of one version."""
    judged, left = [], {}
    for objective in profile.objectives:
        reason = why_not(profile, objective)
        if reason is None:
            n, misses = _counts(objective, series)
            judged.append(Judged(objective, _decide(contract, objective, n, misses), n, misses))
        else:
            left[objective.id] = reason
    if not judged:
        raise InvalidContract(f"{profile.id} has no objective that production metrics carry")
    return judged, left


def worst(judged: list[Judged]) -> str:
    """One broken promise breaks the contract; it is kept when all are."""
    found = {one.status for one in judged}
    return FAIL if FAIL in found else INCONCLUSIVE if INCONCLUSIVE in found else PASS


def scrape(metrics_url: str, version: int) -> Series:
    """The decoder's samples of one version, by name and their labels beside model and version."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{metrics_url}/metrics", timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
    except OSError as error:
        raise SetupError(f"no metrics at {metrics_url} ({error}); name the port with --metrics-port") from None
    return parse(text, version)


def parse(text: str, version: int) -> Series:
    """What scrape() returns, from Prometheus' text format."""
    series = {}
    for sample in _SAMPLE.finditer(text):
        labels = dict(_LABEL.findall(sample["labels"]))
        if labels.pop("version", None) == str(version) and labels.pop("model", None) == "decoder":
            series[sample["name"], frozenset(labels.items())] = float(sample["value"])
    return series


def _counts(objective: Objective, series: Series) -> tuple[int, int]:
    """(requests, those that broke the promise): one that failed or was refused breaks every promise."""
    lost = _sum(series, REFUSED) + _sum(series, FINISHED, finish_reason="error")
    if METRICS[objective.metric].kind != DURATION:
        well = _sum(series, FINISHED, finish_reason="stop") + _sum(series, FINISHED, finish_reason="length")
        return well + lost, lost
    name = f"{PREFIX}_{HISTOGRAMS[objective.metric]}"
    count = _sum(series, f"{name}_count")
    within = series.get((f"{name}_bucket", frozenset({("le", boundary(objective))})))
    if within is None and count:
        rule = f"{name} has no bucket that ends at {boundary(objective)} s"
        raise InvalidContract(f"{objective.id}: {rule}; serve with --histogram-buckets of loadtests/export.py")
    return count + lost, count - int(within or 0) + lost


def _sum(series: Series, name: str, **labels: str) -> int:
    wanted = set(labels.items())
    return int(sum(value for (found, own), value in series.items() if found == name and wanted <= own))


def _decide(contract: Contract, objective: Objective, n: int, misses: int) -> str:
    if objective.quantile == EVERY and misses:
        return FAIL
    return decide(n, misses, shares_claim(objective), contract.statistics.confidence)


def _line(contract: Contract, one: Judged) -> str:
    confidence = contract.statistics.confidence
    low, high = compliance_bounds(one.n, one.misses, confidence)
    text = f"  {one.objective.id:20} {one.misses}/{one.n} missed, compliance {low:.1%} to {high:.1%}  {one.status}"
    share = shares_claim(one.objective)
    if one.status == INCONCLUSIVE and one.misses <= one.n * (1 - share):
        text += f", {samples_needed(one.misses, share, confidence) - one.n} more requests as good decide it"
    return text

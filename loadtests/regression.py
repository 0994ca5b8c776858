"""Two runs compared: what differs beyond what chance explains. And a run against a stored baseline.

`compare` needs the raw records of both, for the difference has an interval of its own: a bootstrap over each run's
requests. A baseline file keeps the quantiles and their intervals of one run, and is compared without its records.
"""

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests import metrics
from loadtests.binomial import compliance_bounds, quantile_ranks
from loadtests.contract import Contract, Profile
from loadtests.fields import Fields, InvalidContract
from loadtests.metrics import in_unit
from loadtests.outcomes import NOT_RUN
from loadtests.records import CANCELLED, OK, CampaignRun, ProfileRun, Record
from loadtests.schedule import windows
from loadtests.verdict import judge
from tritonforge.release import canonical_json

COMPARED = {"ttft_ms": 0.95, "tpot_ms": 0.95, "e2e_ms": 0.95, "max_stall_ms": 0.95}
ENDLESS_NS = 10**15
RESAMPLES = 1000
CONFIDENCE = 0.95
BASELINE = "tritonforge.baseline/1"
BETTER, SAME, WORSE = "better", "no difference proven", "worse"


@dataclass(frozen=True)
class Difference:
    """One metric of one profile in two runs. `ratio` is the second over the first, with its interval, or None."""

    profile: str
    metric: str
    first: float
    second: float
    ratio: float | None
    low: float | None
    high: float | None
    outcome: str


def untrusted(contract: Contract, run: CampaignRun) -> dict[str, str]:
    """Profiles whose measurement is invalid, with the first reason: what they show may be the client's own."""
    verdict = judge(contract, run)
    broken = [check.text for check in verdict.identity if check.ok is False]
    found = {
        part.profile.id: [check.text for check in part.checks if check.ok is False] + broken
        for part in verdict.profiles
        if part.status != NOT_RUN
    }
    return {profile: texts[0] for profile, texts in found.items() if texts}


def compare(
    contract: Contract, first: CampaignRun, second: CampaignRun, *, leave_out: Collection[str] = ()
) -> list[Difference]:
    """The differences between two runs of one contract. Raises InvalidContract when they are of different ones.

    Both must have walked the contract's schedule: a difference of load would be read as one of the service. Profiles
    to `leave_out` are those that are `untrusted` in either run.
    """
    for run in (first, second):
        if run.header.get("contract_sha256") != contract.sha256:
            raise InvalidContract("both runs must be of one contract, with the same sha256")
    others = {part.profile: part for part in second.profiles}
    return [
        difference
        for part in first.profiles
        if part.profile in others and part.profile not in leave_out
        for difference in _differences(contract.profile(part.profile), part, others[part.profile])
    ]


def _differences(profile: Profile, first: ProfileRun, second: ProfileRun) -> list[Difference]:
    found = [_errors(profile.id, *(part.records for part in (first, second)))]
    for name, quantile in COMPARED.items():
        sides = [_values(part.records, name) for part in (first, second)]
        if all(sides):
            values = [metrics.percentile_ns(side, quantile) for side in sides]
            draws = [_quantiles(side, quantile, f"{profile.id}/{name}/{k}") for k, side in enumerate(sides)]
            found.append(_difference(profile.id, f"{name} p{quantile * 100:g}", values, draws, scale=metrics.MS))
    rates = [_rate(profile, part.records) for part in (first, second)]
    if all(sum(counts) for counts, _ in rates):
        values = [sum(counts) / seconds for counts, seconds in rates]
        draws = [_rates(counts, seconds, f"{profile.id}/rate/{k}") for k, (counts, seconds) in enumerate(rates)]
        found.append(_difference(profile.id, "output_tokens_per_s", values, draws, scale=1, more_is_better=True))
    return found


def _errors(profile: str, first: Sequence[Record], second: Sequence[Record]) -> Difference:
    """Shares of requests that did not end ok: another one only where the exact bounds of the two do not meet."""
    sides = [[r.status != OK for r in records if _counts(r)] for records in (first, second)]
    shares = [sum(side) / len(side) if side else 0.0 for side in sides]
    bounds = [compliance_bounds(len(side), sum(side), (1 + CONFIDENCE) / 2) for side in sides]
    (least, most), (then_least, then_most) = [(1 - high, 1 - low) for low, high in bounds]
    outcome = WORSE if then_least > most else BETTER if then_most < least else SAME
    return Difference(profile, "error_ratio", *(round(share, 6) for share in shares), None, None, None, outcome)


def _counts(record: Record) -> bool:
    return record.measured and record.sent_ns is not None and record.status != CANCELLED


def _values(records: Sequence[Record], name: str) -> list[int]:
    """The values of all requests that were sent. One that did not end ok is endless: it would be none of the best."""
    formula = metrics.METRICS[name].value
    found = [formula(r) if r.status == OK else ENDLESS_NS for r in records if _counts(r)]
    return [value for value in found if value is not None]


def _rate(profile: Profile, records: Sequence[Record]) -> tuple[list[int], float]:
    chosen = [window for window in windows(profile.arrivals) if window.phase.measured]
    counts = [c for w in chosen for c in metrics.tokens_in_slices(records, w.start_ns, w.end_ns, 10)]
    return counts, sum(w.end_ns - w.start_ns for w in chosen) / 1e9


def _quantiles(values: Sequence[int], quantile: float, seed: str) -> list[float]:
    rng = random.Random(seed)
    return [metrics.percentile_ns(rng.choices(values, k=len(values)), quantile) for _ in range(RESAMPLES)]


def _rates(counts: Sequence[int], seconds: float, seed: str) -> list[float]:
    rng = random.Random(seed)
    return [sum(rng.choices(counts, k=len(counts))) / seconds for _ in range(RESAMPLES)]


def _difference(
    profile: str,
    metric: str,
    values: list[float],
    draws: list[list[float]],
    *,
    scale: int,
    more_is_better: bool = False,
) -> Difference:
    """Worse or better only when the whole interval of the ratio is on one side of 1."""
    ratios = sorted(after / max(before, 1e-9) for before, after in zip(*draws, strict=True))
    rank = int((1 - CONFIDENCE) / 2 * len(ratios))
    low, high = ratios[rank], ratios[-1 - rank]
    outcome = SAME if low <= 1 <= high else BETTER if (low > 1) == more_is_better else WORSE
    first, second = (round(value / scale, 3) for value in values)
    ratio = values[1] / max(values[0], 1e-9)
    return Difference(profile, metric, first, second, round(ratio, 4), round(low, 4), round(high, 4), outcome)


def baseline_of(contract: Contract, run: CampaignRun) -> dict[str, Any]:
    """What is kept of a run: each compared quantile with its interval, by profile.

    `left_out` says why of profiles whose measurement is invalid.
    """
    found, left_out = {}, untrusted(contract, run)
    for part in (part for part in run.profiles if part.profile not in left_out):
        rows = {}
        for name, quantile in COMPARED.items():
            values = sorted(_values(part.records, name))
            if values:
                ranks = quantile_ranks(len(values), quantile, contract.statistics.confidence)
                low, high = (None if k is None else in_unit(metrics.METRICS[name], values[k]) for k in ranks)
                value = metrics.ms(metrics.percentile_ns(values, quantile))
                rows[name] = {"quantile": quantile, "value": value, "low": low, "high": high, "n": len(values)}
        found[part.profile] = rows
    return {
        "schema": BASELINE,
        "contract": contract.name,
        "contract_sha256": contract.sha256,
        "run_id": run.header.get("run_id"),
        "environment": run.header.get("environment", {}),
        "profiles": found,
        "left_out": left_out,
    }


def read_baseline(path: Path) -> dict[str, Any]:
    """A baseline file. Raises InvalidContract for one that cannot be read or is none."""
    try:
        baseline = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidContract(f"baseline {path} cannot be read: {error}") from error
    fields = Fields(baseline, "baseline")
    fields.text("schema", choices=[BASELINE])
    fields.text("contract_sha256")
    for profile, rows in fields.table("profiles").rest().items():
        for name, row in Fields(rows, f"profiles.{profile}").rest().items():
            values = Fields(row, f"profiles.{profile}.{name}")
            values.number("value", low=0)
            values.number("high", None, low=0)
    return baseline


def write_baseline(path: Path, baseline: dict[str, Any]) -> None:
    """Write canonical JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(canonical_json(baseline) + b"\n")


def regressions(baseline: dict[str, Any], now: dict[str, Any], max_worse: float) -> list[str]:
    """What got worse than a baseline by more than `max_worse` (0.1: a tenth), beyond doubt: a sentence for each.

    A quantile is worse when the lower end of its interval now lies above the upper end then, times 1 + max_worse.
    Raises InvalidContract for a baseline of another contract.
    """
    if baseline["contract_sha256"] != now["contract_sha256"]:
        raise InvalidContract(f"baseline must be of this contract, sha256 {now['contract_sha256']}")
    found = []
    for profile, rows in now["profiles"].items():
        for name, row in rows.items():
            before = baseline["profiles"].get(profile, {}).get(name)
            if before is None or row["low"] is None or before["high"] is None:
                continue
            if row["low"] > before["high"] * (1 + max_worse):
                quantile = f"p{row['quantile'] * 100:g} {name}"
                found.append(
                    f"{profile}: {quantile} is {_told(row['value'])}, at least {_told(row['low'])}; it was "
                    f"{_told(before['value'])}, at most {_told(before['high'])}, and may be {max_worse:.0%} more"
                )
    return found


def not_compared(baseline: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Profiles that only one of the two has, a sentence for each: silence would read as "no regression"."""
    found = [f"{profile}: the measurement is invalid: {why}" for profile, why in now["left_out"].items()]
    for profile in baseline["profiles"]:
        if profile not in now["profiles"] and profile not in now["left_out"]:
            found.append(f"{profile}: was not run")
    return found + [f"{p}: the baseline has none" for p in now["profiles"] if p not in baseline["profiles"]]


def _told(value: float) -> str:
    """A number of a table; what lies among requests that never ended ok is unbounded."""
    return "unbounded" if value >= ENDLESS_NS / metrics.MS else f"{value:g}"


def table_of(differences: Sequence[Difference]) -> str:
    """The differences as a terminal shows them."""
    lines = []
    for item in differences:
        bounded = item.ratio is not None and max(item.first, item.second) < ENDLESS_NS / metrics.MS
        ratio = f"x{item.ratio:.3f} ({item.low:.3f} to {item.high:.3f})" if bounded else ""
        lines.append(
            f"{item.profile:<16} {item.metric:<22} {_told(item.first):>10} -> {_told(item.second):>10}  {ratio:<24}  "
            f"{item.outcome}"
        )
    return "\n".join(lines)

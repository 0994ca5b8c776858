"""Why did an objective come out as it did? Its violators beside the requests that met it: which phase took the time.

`--explain PROFILE.OBJECTIVE` prints it. Pure functions of contract and records.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from loadtests import metrics
from loadtests.contract import Contract, Objective, Profile
from loadtests.fields import InvalidContract
from loadtests.judges import judge_objective
from loadtests.metrics import DURATION, METRICS
from loadtests.outcomes import LATE, MET, in_scope, outcome
from loadtests.provenance import check_identity
from loadtests.records import CampaignRun, ProfileRun, Record
from loadtests.report_text import limit_text
from loadtests.validity import check_profile
from loadtests.verdict import describe

Part = Callable[[Record], int | None]
TTFT_PARTS: dict[str, Part] = {
    "client delay": metrics.client_delay_ns,
    "queue": metrics.queue_ns,
    "prefill": metrics.prefill_ns,
    "first emit": metrics.first_emit_ns,
    "residual": metrics.residual_ttft_ns,
}
PARTS: dict[str, dict[str, Part]] = {
    "ttft_ms": TTFT_PARTS,
    "e2e_ms": {**TTFT_PARTS, "decode": metrics.decode_ns},
    "tpot_ms": {"decode step": metrics.decode_step_ns, "longest stall": metrics.max_stall_ns},
}
"""What a metric is made of; of the others there is nothing to split."""


def find_objective(contract: Contract, name: str):
    """(profile, objective) of PROFILE.OBJECTIVE. Raises InvalidContract, naming what exists."""
    profile_id, _, objective_id = name.partition(".")
    profile = contract.profile(profile_id)
    for objective in profile.objectives:
        if objective.id == objective_id:
            return profile, objective
    known = ", ".join(objective.id for objective in profile.objectives)
    raise InvalidContract(f"objective must be one of {profile_id}'s ({known}), got {objective_id!r}")


def explain(contract: Contract, run: CampaignRun, name: str) -> str:
    """A page of text on one objective: its result, who missed it and when, and which phase made them late."""
    profile, objective = find_objective(contract, name)
    part = next((part for part in run.profiles if part.profile == profile.id), ProfileRun(profile.id, (), ()))
    result = judge_objective(contract.within(profile), profile, objective, part)
    lines = _untrusted(contract, profile, run, part)
    lines.append(f"{name} ({limit_text(vars(objective))}): {result.status}. {describe(result)}.")
    if METRICS[objective.metric].kind != DURATION:
        return "\n".join(lines + _by_status(objective, part.records))
    scope = in_scope(objective, part.records)
    groups: dict[str, list[Record]] = {}
    for record in scope:
        groups.setdefault(outcome(record, objective) or "not applicable", []).append(record)
    lines.append("of these: " + ", ".join(f"{len(group)} {kind}" for kind, group in sorted(groups.items())))
    lines += _when(groups)
    lines += _phases(objective, groups)
    return "\n".join(lines)


def _untrusted(contract: Contract, profile: Profile, run: CampaignRun, part: ProfileRun) -> list[str]:
    """Why the measurement is invalid, if it is: what follows may then be the client's own."""
    checks = (*check_identity(contract, run), *check_profile(contract.within(profile), profile, part))
    return [f"INVALID measurement: {check.name}: {check.text}" for check in checks if check.ok is False]


def _by_status(objective: Objective, records: Sequence[Record]) -> list[str]:
    counts = Counter(f"{r.status} {r.code or ''}".strip() for r in in_scope(objective, records))
    return ["requests: " + (", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "none")]


def _when(groups: dict[str, list[Record]]) -> list[str]:
    """When the misses were due: a burst is one cause, a spread is the load itself."""
    due = sorted(r.scheduled_ns / 1e9 for kind, group in groups.items() if kind != MET for r in group)
    if not due:
        return []
    text = ", ".join(f"{at:.1f}" for at in due[:12]) + (", ..." if len(due) > 12 else "")
    return [f"misses were due at {text} s"]


def _phases(objective: Objective, groups: dict[str, list[Record]]) -> list[str]:
    """Mean of each phase among the late and among those that met the limit, and what made the difference."""
    late = [r for r in groups.get(LATE, []) if r.statistics is not None]
    met = [r for r in groups.get(MET, []) if r.statistics is not None]
    parts = PARTS.get(objective.metric)
    if parts is None or not (late or met):
        return []
    if not late:
        means = ", ".join(f"{name} {_mean_ms(met, part):.2f}" for name, part in parts.items())
        return [f"mean of those that met the limit, ms: {means}"]
    lines, excess = [f"{'mean, ms':<14} {'late':>10} {'met':>10}"], {}
    for name, part in parts.items():
        means = [_mean_ms(group, part) for group in (late, met)]
        excess[name] = means[0] - means[1]
        lines.append(f"{name:<14} {means[0]:>10.2f} {means[1]:>10.2f}")
    dominant = max(excess, key=excess.get)
    compared = "the requests that met the limit" if met else "nothing: no request met the limit"
    return [*lines, f"dominant: {dominant}, {excess[dominant]:.2f} ms more than {compared}"]


def _mean_ms(records: Sequence[Record], part: Part) -> float:
    values = [value for record in records if (value := part(record)) is not None]
    return sum(values) / len(values) / 1e6 if values else 0.0

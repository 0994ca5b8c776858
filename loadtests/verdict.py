"""The verdict: a pure function of contract and records. The same records give the same verdict, bit for bit.

The campaign and `--recompute` call `judge`; nothing here reads a clock, a file or the network.
"""

from collections import Counter
from dataclasses import dataclass

from loadtests.binomial import FAIL, INCONCLUSIVE, PASS
from loadtests.checks import Check
from loadtests.contract import EVERY, Contract, Profile
from loadtests.judges import judge_objective
from loadtests.metrics import AVAILABILITY, COUNT, FACT, METRICS
from loadtests.outcomes import INVALID, LATE, MET, NOT_RUN, Result, in_scope, limit_of, outcome
from loadtests.provenance import check_identity
from loadtests.records import CampaignRun, ProfileRun
from loadtests.validity import check_profile

__all__ = ["INVALID", "LATE", "MET", "NOT_RUN", "Result", "in_scope", "judge", "limit_of", "outcome"]
EXIT_CODES = {PASS: 0, FAIL: 1, INVALID: 3, INCONCLUSIVE: 4, NOT_RUN: 4}
WORST_FIRST = (FAIL, INVALID, INCONCLUSIVE, NOT_RUN, PASS)
"""Of objectives and of profiles. A proven failure is not hidden by another one that could not be judged; but where the
measurement itself is broken, nothing in that profile is proven."""


@dataclass(frozen=True)
class ProfileVerdict:
    """One profile: its status, why, and everything that was looked at."""

    profile: Profile
    status: str
    reasons: tuple[str, ...]
    counts: dict[str, int]
    checks: tuple[Check, ...]
    results: tuple[Result, ...]


@dataclass(frozen=True)
class Verdict:
    """The whole campaign. `exit_code`: 0 passed, 1 failed, 3 measurement invalid, 4 undecided."""

    status: str
    reasons: tuple[str, ...]
    identity: tuple[Check, ...]
    profiles: tuple[ProfileVerdict, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]


def judge(contract: Contract, run: CampaignRun) -> Verdict:
    """Judge all profiles of a contract. A failure of a valid profile beats an invalid measurement of another one."""
    identity = check_identity(contract, run)
    selected = run.header.get("profiles", [])
    runs = {part.profile: part for part in run.profiles}
    verdicts = []
    for profile in contract.profiles:
        if profile.id in runs or profile.id in selected:
            verdicts.append(judge_profile(contract, profile, runs.get(profile.id, ProfileRun(profile.id, (), ()))))
        else:
            verdicts.append(ProfileVerdict(profile, NOT_RUN, ("was not run",), {}, (), ()))
    statuses = [verdict.status for verdict in verdicts if verdict.profile.required]
    status = next((status for status in WORST_FIRST if status in statuses), NOT_RUN)
    broken = tuple(check.text for check in identity if check.ok is False)
    if broken:
        status = INVALID
    reasons = broken + tuple(f"{v.profile.id}: {reason}" for v in verdicts for reason in v.reasons)
    return Verdict(status, reasons, identity, tuple(verdicts))


def judge_profile(contract: Contract, profile: Profile, run: ProfileRun) -> ProfileVerdict:
    """Judge one profile: INVALID when a check of the measurement is broken, else what its objectives say."""
    contract = contract.within(profile)
    checks = check_profile(contract, profile, run)
    results = tuple(judge_objective(contract, profile, objective, run) for objective in profile.objectives)
    counts = dict(Counter(record.status for record in run.records))
    counts["scheduled"] = sum(counts.values())
    broken = [f"{check.name}: {check.text}" for check in checks if check.ok is False]
    statuses = [result.status for result in results]
    status = INVALID if broken else next(status for status in WORST_FIRST if status in statuses)
    reasons = broken or [describe(result) for result in results if result.status != PASS]
    return ProfileVerdict(profile, status, tuple(reasons), counts, checks, results)


def describe(result: Result) -> str:
    """One sentence on an objective that did not pass, with its numbers."""
    objective = result.objective
    limit = f"at most {objective.le:g}" if objective.le is not None else f"at least {objective.ge:g}"
    limit += " ms" if objective.metric.endswith("_ms") else ""
    if METRICS[objective.metric].kind == FACT:
        value = "was never reached" if result.value is None else f"is {result.value:g}"
        return f"{objective.id}: {objective.metric} {value}, {limit} is required" + ("" if result.n else " (not told)")
    if METRICS[objective.metric].kind == COUNT and result.status == FAIL:
        return f"{objective.id}: {result.value:g} of {result.n} requests count, {limit} may"
    if result.bounds is None:
        value = "unbounded" if result.value is None else f"{result.value:g}"
        low, high = ("unknown" if bound is None else f"{bound:g}" for bound in result.interval)
        return f"{objective.id}: {value}, between {low} and {high}; {limit} is required"
    missed = ", ".join(f"{count} {cause}" for cause, count in sorted(result.misses.items())) or "none"
    counted = "slices" if METRICS[objective.metric].kind == AVAILABILITY else "requests"
    promise = limit if objective.quantile else f"({missed}), {limit} is required"
    text = f"{objective.id}: {sum(result.misses.values())} of {result.n} {counted} missed {promise}"
    text += f" ({missed})" if objective.quantile else ""
    if result.status == INVALID:
        return f"{objective.id}: {result.not_applicable} requests have no {objective.metric}, too many to judge it"
    if result.status == FAIL and objective.quantile == EVERY:
        return f"{text}; no request may"
    if result.status == FAIL:
        return f"{text}; compliance is at most {result.bounds[1]:.1%}"
    more = f"; {result.more_samples} more requests like these would decide it" if result.more_samples else ""
    return f"{text}; compliance lies between {result.bounds[0]:.1%} and {result.bounds[1]:.1%}{more}"

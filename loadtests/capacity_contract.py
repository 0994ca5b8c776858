"""The contract of a capacity trial: the given contract at another rate, long enough to be decided. Pure.

The workload, the limits and the rules of the measurement stay; what must change is listed at `at_rate`.
"""

import copy
from typing import Any

from loadtests.binomial import samples_needed
from loadtests.contract import Contract, Objective, Profile
from loadtests.contract_toml import parse_contract
from loadtests.fields import InvalidContract
from loadtests.judges import shares_claim
from loadtests.lint import needs
from loadtests.metrics import AVAILABILITY, COUNT, DURATION, METRICS, RATIO
from loadtests.schedule import build_schedule

JUDGED = (DURATION, RATIO, AVAILABILITY, COUNT)
"""Kinds of objectives that mean the same at every rate. Rate floors do not, nor do costs, which follow from the rate,
comparisons with a phase that has a rate of its own, and facts of the server over a whole run."""
WITHOUT_RATE = ("trace", "batch")
ALLOWED_MISSES = 1
"""A trial is long enough to pass with so many misses of each objective; without any, one bad moment ends a search."""
ROUNDS = 12
SPARE = 1.02


def choose_profile(contract: Contract, name: str | None) -> Profile:
    """The profile to search: the named one, or the only one. Raises InvalidContract."""
    if name is not None:
        return contract.profile(name)
    if len(contract.profiles) > 1:
        known = ", ".join(profile.id for profile in contract.profiles)
        raise InvalidContract(f"profile must be named when a contract has several, one of {known}")
    return contract.profiles[0]


def mean_rate(profile: Profile) -> float:
    """Requests per second over the measured phases under load. Raises InvalidContract for arrivals without a rate."""
    phases = [phase for phase in profile.arrivals.phases if phase.measured and not phase.unloaded]
    seconds = sum(phase.seconds for phase in phases)
    if not seconds or profile.arrivals.process in WITHOUT_RATE:
        raise InvalidContract(
            f"{profile.id}.arrivals must have measured phases with a rate to be searched for capacity"
        )
    return sum(phase.rate * phase.seconds for phase in phases) / seconds


def left_out(profile: Profile) -> list[Objective]:
    """The objectives that trials do not judge: see JUDGED; and those of phases without load."""
    unloaded = {phase.name for phase in profile.arrivals.phases if phase.unloaded}
    return [o for o in profile.objectives if METRICS[o.metric].kind not in JUDGED or o.phase in unloaded]


def requests_needed(contract: Contract, objective: Objective, misses: int) -> int:
    """The fewest requests (or time slices) with which an objective passes after `misses` of them missed it."""
    share = shares_claim(objective)
    # Of a count, and of a quantile of 1, one miss is a failure: more requests would not help.
    misses = 0 if METRICS[objective.metric].kind == COUNT or objective.quantile == 1 else misses
    return 1 if share is None else samples_needed(misses, share, contract.statistics.confidence)


def at_rate(
    document: dict[str, Any], profile_id: str, rate: float, *, seed: int, min_seconds: float, longer: float = 1.0
) -> dict[str, Any]:
    """The document of a trial: only this profile, at `rate` requests per second over its measured phases.

    Phases keep their proportions and are made long enough: ALLOWED_MISSES, at least `min_seconds`, and `longer` times
    that. Phases without load, and the objectives of `left_out`, are not in it. The in-flight guard is lifted: overload
    must show as broken promises and not as a broken measurement. Raises InvalidContract when nothing is left to judge,
    and for a profile with a fault.
    """
    profile = parse_contract(document).profile(profile_id)
    factor = rate / mean_rate(profile)
    trial = copy.deepcopy(document)
    part = next(part for part in trial["profiles"] if part["id"] == profile_id)
    trial["profiles"] = [part]
    _reduce(part, profile)
    part["arrivals"]["seed"] = seed
    part["repeats"] = 1
    phases = part["arrivals"]["phases"]
    for phase in phases:
        phase["rate"] = phase["rate"] * factor
    measured = [phase for phase in phases if phase.get("measured", True)]
    _stretch(measured, min_seconds / sum(phase["seconds"] for phase in measured))
    for _ in range(ROUNDS):
        short = _shortage(parse_contract(trial), profile_id)
        if short <= 1:
            break
        _stretch(measured, short * SPARE)
    _stretch(measured, longer)
    expected = sum(phase["rate"] * phase["seconds"] for phase in phases)
    guard = max(profile.client.max_in_flight, round(4 * expected) + 100)
    part["client"] = {**part.get("client", {}), "max_in_flight": guard}
    return trial


def _reduce(part: dict[str, Any], profile: Profile) -> None:
    """Leave in a profile's table only what a trial loads and judges."""
    if profile.fault is not None:
        raise InvalidContract(f"{profile.id}.fault must not be there for a search of capacity; search another profile")
    names = {objective.id for objective in left_out(profile)}
    part["objectives"] = [item for item in part["objectives"] if item["id"] not in names]
    if not part["objectives"]:
        raise InvalidContract(f"{profile.id}.objectives must hold more than rate floors to have a capacity")
    unloaded = {phase.name for phase in profile.arrivals.phases if phase.unloaded}
    part["arrivals"]["phases"] = [phase for phase in part["arrivals"]["phases"] if phase["name"] not in unloaded]
    for phase in part["arrivals"]["phases"]:
        if phase.get("like") in unloaded:
            del phase["like"]


def _stretch(phases: list[dict[str, Any]], factor: float) -> None:
    for phase in phases:
        phase["seconds"] = round(phase["seconds"] * factor, 3)


def _shortage(contract: Contract, profile_id: str) -> float:
    """By how much the schedule is too short for the objective that needs most; at most 1 when it is long enough."""
    profile = contract.profile(profile_id)
    contract, slots = contract.within(profile), build_schedule(profile)
    worst = 0.0
    for objective in profile.objectives:
        needed = requests_needed(contract, objective, ALLOWED_MISSES)
        worst = max(worst, needed / max(needs(contract, profile, objective, slots).has, 0.5))
    return min(worst, 100.0)

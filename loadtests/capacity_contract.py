"""The contract of a capacity trial: the given contract at another rate, long enough to be decided. Pure.

The workload, the limits and the rules of the measurement stay; what must change is listed at `at_rate`.
"""

import copy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtests import contract_toml
from loadtests.binomial import samples_needed
from loadtests.contract import EVERY, EVERY_PROVES, Contract, Objective, Profile
from loadtests.contract_toml import parse_contract
from loadtests.fields import InvalidContract
from loadtests.metrics import METRICS, RATE, RATIO

SPARE = 1.15
"""Poisson arrivals come in other numbers than expected: so many more are planned than are needed."""
ALLOWED_MISSES = 1
"""A trial is long enough to pass with so many misses of each objective; without any, one bad moment ends a search."""


def read_document(path: Path) -> dict[str, Any]:
    """A contract file as a document, everything it refers to included. Raises InvalidContract."""
    read: Callable[[Path], dict[str, Any]] | None = getattr(contract_toml, "read_document", None)
    if read is not None:
        return read(path)
    contract_toml.load_contract(path)
    return tomllib.loads(path.read_text(encoding="utf-8"))


def choose_profile(contract: Contract, name: str | None) -> Profile:
    """The profile to search: the named one, or the only one. Raises InvalidContract."""
    if name is not None:
        return contract.profile(name)
    if len(contract.profiles) > 1:
        known = ", ".join(profile.id for profile in contract.profiles)
        raise InvalidContract(f"profile must be named when a contract has several, one of {known}")
    return contract.profiles[0]


def mean_rate(profile: Profile) -> float:
    """Requests per second over the measured phases. Raises InvalidContract for arrivals that have no rate."""
    phases = [phase for phase in profile.arrivals.phases if phase.measured]
    seconds = sum(phase.seconds for phase in phases)
    if not seconds:
        raise InvalidContract(f"{profile.id} must have measured phases with a rate to be searched for its capacity")
    return sum(phase.rate * phase.seconds for phase in phases) / seconds


def is_floor(objective: Objective) -> bool:
    """True for an objective on a rate: no lower rate can keep it, and it is what capacity measures."""
    return METRICS[objective.metric].kind == RATE


def requests_needed(contract: Contract, objective: Objective, misses: int) -> int:
    """The fewest requests with which an objective passes after `misses` of them missed it."""
    share = EVERY_PROVES if objective.quantile == EVERY else objective.quantile
    if METRICS[objective.metric].kind == RATIO:
        share = objective.ge if objective.ge is not None else round(1 - objective.le, 12)
    return samples_needed(misses, share, contract.statistics.confidence)


def at_rate(
    document: dict[str, Any], profile_id: str, rate: float, *, seed: int, min_seconds: float, longer: float = 1.0
) -> dict[str, Any]:
    """The document of a trial: only this profile, at `rate` requests per second over its measured phases.

    Phases keep their proportions and are made long enough: ALLOWED_MISSES, at least `min_seconds`, and `longer` times
    that. Rate floors are left out, they say nothing against a lower rate. The in-flight guard is lifted: overload must
    show as broken promises and not as a broken measurement. Raises InvalidContract when nothing is left to judge.
    """
    trial = copy.deepcopy(document)
    part = next(part for part in trial["profiles"] if part["id"] == profile_id)
    trial["profiles"] = [part]
    part["objectives"] = [item for item in part["objectives"] if METRICS[item["metric"]].kind != RATE]
    if not part["objectives"]:
        raise InvalidContract(f"{profile_id}.objectives must hold more than rate floors to have a capacity")
    contract = parse_contract(trial)
    profile = contract.profile(profile_id)
    part["arrivals"]["seed"] = seed
    _scale(contract, profile, part["arrivals"]["phases"], rate, min_seconds, longer)
    expected = sum(phase["rate"] * phase["seconds"] for phase in part["arrivals"]["phases"])
    guard = max(profile.client.max_in_flight, round(4 * expected) + 100)
    part["client"] = {**part.get("client", {}), "max_in_flight": guard}
    return trial


def _scale(
    contract: Contract, profile: Profile, phases: list[dict[str, Any]], rate: float, min_seconds: float, longer: float
) -> None:
    """Set rate and seconds of each phase in place."""
    factor = rate / mean_rate(profile)
    for phase in phases:
        phase["rate"] = phase["rate"] * factor
    measured = [phase for phase in phases if phase.get("measured", True)]
    stretch = min_seconds / sum(phase["seconds"] for phase in measured)
    for objective in profile.objectives:
        scope = [phase for phase in measured if objective.phase in (None, phase["name"])]
        expected = sum(phase["rate"] * phase["seconds"] for phase in scope)
        stretch = max(stretch, SPARE * requests_needed(contract, objective, ALLOWED_MISSES) / expected)
    for phase in measured:
        phase["seconds"] = round(phase["seconds"] * stretch * longer, 3)

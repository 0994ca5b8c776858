"""Can this contract be decided, and what does it take? Said before any load runs; undecidable objectives are refused.

A run calls `lint` and `check_access`; the command `--lint` prints `needs` of each objective.
"""

import math
from dataclasses import dataclass

from loadtests.binomial import samples_needed
from loadtests.contract import Contract, Objective, Profile
from loadtests.facts import GAUGES
from loadtests.fields import InvalidContract
from loadtests.judges import FEWEST_RESAMPLED, shares_claim
from loadtests.metrics import AVAILABILITY, COMPARISON, COUNT, FACT, MEAN, METRICS, RATE
from loadtests.schedule import Slot, build_schedule


@dataclass(frozen=True)
class Needs:
    """What one objective has and needs: `unit` is what is counted; `seconds` is the shortest deciding load.

    `seconds` is None where the schedule offers none of what is counted.
    """

    objective: Objective
    unit: str
    has: int
    needed: int
    seconds: float | None


def lint(contract: Contract, profile: Profile) -> list[Needs]:
    """The needs of each objective. Raises InvalidContract, by name, for one that the schedule cannot decide."""
    contract = contract.within(profile)
    slots = build_schedule(profile)
    found = [needs(contract, profile, objective, slots) for objective in profile.objectives]
    for need in found:
        objective = need.objective
        if need.has < need.needed:
            longer = "" if need.seconds is None else f", {need.seconds:g} s at this rate"
            rule = f"needs at least {need.needed} {need.unit} to be decided{longer}, its schedule has {need.has}"
            raise InvalidContract(f"{profile.id}.{objective.id} {rule}; make the phase longer or the claim weaker")
        if objective.metric.startswith("cost_") and contract.cost is None:
            raise InvalidContract(f"{profile.id}.{objective.id} needs the price of a machine: [cost] per_hour")
        shortest_answer = min(tenant.output_tokens.min for tenant in _tenants(profile, objective))
        if objective.metric in ("tpot_ms", "max_stall_ms", "tpot_against_phase") and shortest_answer < 2:
            raise InvalidContract(
                f"{profile.id}.{objective.id} needs output_tokens of at least 2, got {shortest_answer}"
            )
    return found


def _tenants(profile: Profile, objective: Objective):
    return [tenant for tenant in profile.everyone() if objective.tenant in (None, tenant.id)]


def needs(contract: Contract, profile: Profile, objective: Objective, slots: list[Slot]) -> Needs:
    """What an objective needs and what its schedule has."""
    kind = METRICS[objective.metric].kind
    chosen = [p for p in profile.arrivals.phases if p.measured and objective.phase in (None, p.name)]
    seconds = sum(phase.seconds for phase in chosen)
    needed = shortest(contract, objective)
    if kind == MEAN:
        needed = max(needed, _to_see_the_worst(contract, profile, objective))
    if kind == AVAILABILITY:
        has = math.floor(seconds / objective.slice_s)
        return Needs(objective, "time slices", has, needed, needed * objective.slice_s)
    scope = [s for s in slots if s.measured and objective.phase in (None, s.phase) and _speaks_of(objective, s)]
    has, unit = len(scope), "cancelled requests" if METRICS[objective.metric].part == "cancel" else "requests"
    if kind == COMPARISON:
        other = [s for s in slots if s.phase == objective.against and objective.tenant in (None, s.tenant)]
        has, unit = min(has, len(other)), "requests in each of the two phases"
    return Needs(objective, unit, has, needed, math.ceil(needed * seconds / has) if has else None)


def _to_see_the_worst(contract: Contract, profile: Profile, objective: Objective) -> int:
    """The fewest requests of a mean: those of a kind that none of them is must be too few to break the limit."""
    share = 1 - objective.ge if objective.ge is not None else 1.0
    if objective.metric == "attempts_per_request":
        share = (objective.le - 1) / (profile.retry.max_attempts - 1)
    if share <= 0:
        raise InvalidContract(f"{profile.id}.{objective.id} can be proven by no number of requests: it allows nothing")
    return samples_needed(0, round(1 - share, 12), contract.statistics.confidence) if share < 1 else 1


def _speaks_of(objective: Objective, slot: Slot) -> bool:
    """Whether a slot is in the scope of an objective: requests to be cancelled are in that of cancel metrics only."""
    of_cancels = METRICS[objective.metric].part == "cancel"
    return objective.tenant in (None, slot.tenant) and slot.is_cancelled == of_cancels


def shortest(contract: Contract, objective: Objective) -> int:
    """The fewest requests (or slices) that can decide an objective, if none of them misses."""
    kind = METRICS[objective.metric].kind
    share = shares_claim(objective)
    if share is not None:
        return samples_needed(0, share, contract.statistics.confidence)
    if kind == COMPARISON:
        return max(FEWEST_RESAMPLED, samples_needed(0, objective.quantile, contract.statistics.confidence))
    if kind in (RATE, MEAN):
        return FEWEST_RESAMPLED if kind == MEAN else contract.statistics.slices
    return 1 if kind in (FACT, COUNT) else FEWEST_RESAMPLED


def check_access(profile: Profile, *, metrics_url: str | None, server_pid: int | None) -> None:
    """Refuse, before the load, a profile that needs to see or touch more of the server than the run was given."""
    for objective in profile.objectives:
        gauge = GAUGES.get(objective.metric)
        if gauge == "kv_blocks_held" and metrics_url is None:
            raise InvalidContract(f"{profile.id}.{objective.id} reads the server's metrics: give --metrics-url")
        if gauge == "rss_bytes" and server_pid is None:
            raise InvalidContract(f"{profile.id}.{objective.id} reads the server's memory: give --server-pid")
    if profile.fault is not None and server_pid is None:
        raise InvalidContract(f"{profile.id} kills the decoder: give --server-pid, the process that serves")


def load_of(contract: Contract, profile: Profile) -> dict[str, float]:
    """What a profile asks of machine and client: seconds, requests, tokens, and how many workers must send it.

    A worker takes `messages_per_s_max` responses a second; the busiest second is taken to be the one in which most
    tokens are asked for, each of them a response. Batches come as fast as they are served: they count nothing.
    """
    slots, limit = build_schedule(profile), contract.within(profile).measurement.messages_per_s_max
    by_second: dict[int, int] = {}
    batches = {phase.name for phase in profile.arrivals.phases if phase.count}
    for slot in slots:
        if slot.phase in batches:
            continue
        second = slot.at_ns // 1_000_000_000
        by_second[second] = by_second.get(second, 0) + slot.output_tokens
    return {
        "seconds": sum(phase.seconds for phase in profile.arrivals.phases),
        "requests": len(slots),
        "measured": sum(slot.measured for slot in slots),
        "prompt_tokens": sum(slot.prompt_tokens for slot in slots),
        "output_tokens": sum(slot.output_tokens for slot in slots),
        "workers": max(1, math.ceil(max(by_second.values(), default=0) / limit)),
    }

"""Rules between the parts of a profile: what an objective may refer to, and which parts go together.

contract_toml calls them once a profile has been read.
"""

from typing import Any

from loadtests.contract import Objective, Profile
from loadtests.facts import QUIET_NS
from loadtests.fields import Fields, InvalidContract
from loadtests.metrics import METRICS
from loadtests.workload import Tenant
from loadtests.workload_toml import distinct


def refuse_lengths(fields: Fields, lengths: dict[str, Any], tenants: tuple[Tenant, ...]) -> None:
    """A quality set has prompts of its own: lengths and tenants would be ignored."""
    for name, value in lengths.items():
        if value is not None:
            raise InvalidContract(f"{fields.path(name)} has no meaning with data.source quality")
    if tenants:
        raise InvalidContract(f"{fields.path('tenants')} has no meaning with data.source quality")


def check_profile(profile: Profile, fields: Fields) -> None:
    """Refuse, by name, what contradicts itself. Raises InvalidContract."""
    where = fields.path("objectives")
    distinct([objective.id for objective in profile.objectives], where, "objective")
    if profile.data.source == "quality":
        distinct([item.id for item in profile.quality], fields.path("quality"), "item")
    for objective in profile.objectives:
        _check_scope(profile, objective, f"{where} {objective.id}")
        _check_metric(profile, objective, f"{where} {objective.id}")
    cancels = any(tenant.cancel for tenant in profile.tenants)
    if cancels and profile.protocol == "http-sse":
        raise InvalidContract(f"{fields.where}: cancel needs grpc-stream, HTTP requests have no id to cancel by")
    if profile.arrivals.process == "trace" and (profile.tenants or any(p.unloaded for p in profile.arrivals.phases)):
        raise InvalidContract(f"{fields.path('arrivals.phases')}: a trace has neither tenants nor unloaded phases")
    shared = profile.data.shared_prefix_tokens
    shortest = min(tenant.prompt_tokens.min for tenant in profile.everyone())
    if shared and shared >= shortest:
        raise InvalidContract(f"{fields.path('data.shared_prefix_tokens')} must be less than any prompt, got {shared}")
    if profile.arrivals.repeats > 1 and (profile.fault or profile.arrivals.process == "batch"):
        rule = "must be 1 in a profile with a fault or of batches: run the campaign again instead"
        raise InvalidContract(f"{fields.path('repeats')} {rule}, got {profile.arrivals.repeats}")
    if profile.fault and profile.fault.at_s >= sum(phase.seconds for phase in profile.arrivals.phases):
        raise InvalidContract(f"{fields.path('fault.at_s')} must lie within the schedule, got {profile.fault.at_s:g}")


def _check_scope(profile: Profile, objective: Objective, where: str) -> None:
    phases = {phase.name: phase for phase in profile.arrivals.phases}
    measured = [name for name, phase in phases.items() if phase.measured]
    if objective.phase is not None and objective.phase not in measured:
        rule = f"must be a measured phase ({', '.join(measured)})"
        raise InvalidContract(f"{where}: phase {rule}, got {objective.phase!r}")
    tenants = [tenant.id for tenant in profile.tenants]
    if objective.tenant is not None and objective.tenant not in tenants:
        rule = f"must be one of the profile's tenants ({', '.join(tenants) or 'it has none'})"
        raise InvalidContract(f"{where}: tenant {rule}, got {objective.tenant!r}")
    if objective.against is not None and objective.against not in phases:
        raise InvalidContract(f"{where}: against must be a phase ({', '.join(phases)}), got {objective.against!r}")
    if objective.against is not None and objective.against == objective.phase:
        raise InvalidContract(f"{where}: against must be another phase than its own, got {objective.against!r}")


def _check_metric(profile: Profile, objective: Objective, where: str) -> None:
    """An objective on something that the profile never does would pass for nothing."""
    needs = {
        "cancel": any(tenant.cancel for tenant in profile.tenants),
        "fault": profile.fault is not None,
        "quality": profile.data.source == "quality",
        "retry": profile.retry is not None,
    }
    if objective.metric == "recovery_s" and profile.fault:
        left = sum(phase.seconds for phase in profile.arrivals.phases) - profile.fault.at_s
        if left < objective.le + QUIET_NS / 1e9:
            rule = f"must leave the schedule {QUIET_NS / 1e9:g} s to see it recovered, {left:g} s follow the fault"
            raise InvalidContract(f"{where}: le {rule}, got {objective.le:g}")
    part = METRICS[objective.metric].part
    if part is not None and not needs[part]:
        raise InvalidContract(f"{where}: {objective.metric} needs a profile with {part}")

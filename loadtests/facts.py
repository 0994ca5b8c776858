"""Facts of one run: values with no sample behind them, read from the server's gauges and around a fault. Pure.

A fact is not a claim about all runs: repeat the campaign for that. The judges call `fact_of`.
"""

from loadtests import metrics
from loadtests.contract import Objective, Profile
from loadtests.outcomes import MET, promises_of, worst_of
from loadtests.records import CENSORED, TIMEOUT, ProfileRun, Record

MIB = 1 << 20
GAUGES = {"kv_blocks_leaked": "kv_blocks_held", "server_rss_growth_mib": "rss_bytes"}
"""The gauge of the server that a fact is the growth of, over the profile and its drain."""
QUIET_NS = 3_000_000_000
"""A service has recovered when all requests due in this time after a moment are good."""


def fact_of(profile: Profile, objective: Objective, run: ProfileRun) -> float | None:
    """The value of a fact metric in the unit of its limit, or None when the run does not tell it."""
    gauges = (run.server or {}).get("gauges") or {}
    if objective.metric in GAUGES:
        grown = _growth(gauges, GAUGES[objective.metric])
        mib = objective.metric.endswith("_mib")
        return round(grown / MIB, 3) if mib and grown is not None else grown
    fault = fault_ns(run)
    if fault is None:
        return None
    after = sorted((r for r in run.records if r.sent_ns is not None), key=lambda r: r.scheduled_ns)
    if objective.metric == "fault_to_answer_ms":
        return metrics.ms(_answered(after, fault))
    return _recovered(profile, after, fault)


def fault_ns(run: ProfileRun) -> int | None:
    """When the fault was done, on the clock of the records; None when it was not."""
    return next((shard.fault_ns for shard in run.shards if shard.fault_ns is not None), None)


def _growth(gauges: dict, name: str) -> float | None:
    before, after = gauges.get("before") or {}, gauges.get("after") or {}
    return after[name] - before[name] if name in before and name in after else None


def _answered(records: list[Record], fault: int) -> int | None:
    """From the fault to the first definite outcome, good or bad, of a request that was sent after it."""
    ends = [r.end_ns for r in records if r.sent_ns >= fault and r.status not in (TIMEOUT, CENSORED)]
    return min(ends) - fault if ends else None


def _recovered(profile: Profile, records: list[Record], fault: int) -> float | None:
    """Seconds from the fault to the due time of the first request from which on all are good for QUIET_NS.

    None when that never happened, or when the schedule ended before it could be seen.
    """
    promises = promises_of(profile)
    later = [r for r in records if r.scheduled_ns >= fault]
    bad = [r.scheduled_ns for r in later if worst_of(r, promises) != MET]
    for record in later:
        end = record.scheduled_ns + QUIET_NS
        if later[-1].scheduled_ns < end:
            return None
        if not any(record.scheduled_ns <= at < end for at in bad):
            return round((record.scheduled_ns - fault) / 1e9, 3)
    return None

"""Did a run do what its profile says beside sending requests: its baseline, its fault? And what the server's own gauges
say about it. Pure; validity calls it.
"""

import itertools
from collections.abc import Iterator

from loadtests.checks import Check, first_sent_ns, issued, limited
from loadtests.contract import Profile
from loadtests.facts import GAUGES, fault_ns
from loadtests.records import OK, ProfileRun

OVERLAP_MAX = 0.1
LATE_FAULT_NS = 2_000_000_000


def profile_was_carried_out(profile: Profile, run: ProfileRun) -> Iterator[Check]:
    """Checks that only some profiles have, in a fixed order."""
    for phase in profile.arrivals.phases:
        if phase.unloaded:
            yield _was_unloaded(phase.name, run)
    if profile.fault is not None:
        done = fault_ns(run)
        late = done is None or abs(done - profile.fault.at_s * 1e9) > LATE_FAULT_NS
        found = "was not done" if done is None else f"was done at {done / 1e9:.2f} s"
        yield Check("fault", not late, f"{profile.fault.action} {found}, planned at {profile.fault.at_s:g} s")
    gauges = (run.server or {}).get("gauges") or {}
    before, after = gauges.get("before") or {}, gauges.get("after") or {}
    for objective in profile.objectives:
        if objective.metric in GAUGES:
            name = GAUGES[objective.metric]
            told = name in before and name in after
            yield Check("gauges", told, f"the server {'told' if told else 'did not tell'} {name} before and after")
    if profile.fault is None and "tokens" in before and "tokens" in after:
        yield _tokens_reconcile(after["tokens"] - before["tokens"], run)


def _was_unloaded(phase: str, run: ProfileRun) -> Check:
    """A baseline is one only when its requests were alone."""
    own = sorted((first_sent_ns(r), r.end_ns) for r in issued(run) if r.phase == phase and r.end_ns is not None)
    overlapping = sum(later[0] < earlier[1] for earlier, later in itertools.pairwise(own))
    share = overlapping / len(own) if own else 1.0
    return limited("unloaded", f"share of requests of {phase} that were not alone:", share, OVERLAP_MAX)


def _tokens_reconcile(counted: float, run: ProfileRun) -> Check:
    """The engine sampled at least what answers that ended ok had, and at most what all attempts asked for."""
    low = sum(r.statistics["completion_tokens"] for r in run.records if r.status == OK and r.statistics)
    high = sum(r.output_tokens * (1 + len(r.attempts)) for r in issued(run))
    good = low * 0.99 <= counted <= high * 1.01 + 1
    text = f"the engine sampled {counted:g} tokens, answers that ended ok have {low}, all together asked for {high}"
    return Check("engine_tokens", good, text + ("" if good else ": somebody else used it, or tokens were lost"))

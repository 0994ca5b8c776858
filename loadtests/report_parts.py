"""Parts of a report that only some profiles have: each tenant's figures, answers of a quality set, retries, the fault.

Pure; report calls it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from loadtests import metrics
from loadtests.answers import is_right
from loadtests.contract import Profile
from loadtests.facts import fault_ns
from loadtests.metrics import ms, percentile_ns
from loadtests.records import OK, ProfileRun, Record

EXAMPLE_CHARACTERS = 120


def special_parts(profile: Profile, run: ProfileRun) -> dict[str, Any]:
    """What this profile has beside the common figures; {} for a plain one."""
    measured = [record for record in run.records if record.measured]
    parts: dict[str, Any] = {}
    if profile.tenants:
        parts["tenants"] = {tenant.id: _tenant(tenant.id, measured) for tenant in profile.tenants}
    if profile.quality:
        parts["quality"] = _quality(profile, measured)
    if profile.retry is not None:
        parts["attempts"] = sum(len(record.attempts) + 1 for record in measured if record.sent_ns is not None)
    if profile.fault is not None:
        parts["fault"] = {"action": profile.fault.action, "at_s": _seconds(fault_ns(run))}
    return parts


def _seconds(value_ns: int | None) -> float | None:
    return None if value_ns is None else round(value_ns / 1e9, 3)


def _tenant(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """Outcomes of one tenant's requests, and p50 and p95 of TTFT, TPOT and queue of those that ended ok."""
    own = [record for record in records if record.tenant == name]
    row: dict[str, Any] = {"counts": dict(sorted(Counter(record.status for record in own).items()))}
    for label, formula in (("ttft", metrics.ttft_ns), ("tpot", metrics.tpot_ns), ("queue", metrics.queue_ns)):
        values = [value for r in own if r.status == OK and (value := formula(r)) is not None]
        row |= {f"{label}_ms_p{q * 100:g}": ms(percentile_ns(values, q)) for q in (0.5, 0.95)}
    return row


def _quality(profile: Profile, records: Sequence[Record]) -> dict[str, Any]:
    """How often each item was asked and answered right, with the first wrong answer."""
    found = {}
    for item in profile.quality:
        own = [record for record in records if record.item == item.id]
        wrong = [r.answer or "" for r in own if r.status == OK and not is_right(item, r.answer or "")]
        right = sum(record.status == OK for record in own) - len(wrong)
        example = wrong[0][:EXAMPLE_CHARACTERS] if wrong else None
        found[item.id] = {"asked": len(own), "right": right, "wrong_answer": example}
    return found

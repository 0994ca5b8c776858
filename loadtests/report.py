"""The report as data: everything a verdict rests on, computed from contract and records only, so it can be recomputed.

`build_report` makes the JSON document, which report_text shows on a terminal. Durations are milliseconds with decimals.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests import metrics
from loadtests.contract import Contract, Objective, Profile
from loadtests.metrics import ms, percentile_ns
from loadtests.outcomes import LATE, Result, in_scope, outcome
from loadtests.records import CANCELLED, OK, CampaignRun, ProfileRun, Record
from loadtests.report_parts import special_parts
from loadtests.schedule import build_schedule, schedule_sha256, windows
from loadtests.validity import mean_in_flight
from loadtests.verdict import ProfileVerdict, Verdict
from tritonforge.release import canonical_json

SCHEMA = "tritonforge.report/1"
QUANTILES = (0.5, 0.9, 0.95, 0.99)
DISTRIBUTIONS = {
    "ttft_ms": metrics.ttft_ns,
    "tpot_ms": metrics.tpot_ns,
    "max_stall_ms": metrics.max_stall_ns,
    "e2e_ms": metrics.e2e_ns,
    "client_delay_ms": metrics.client_delay_ns,
    "queue_ms": metrics.queue_ns,
    "prefill_ms": metrics.prefill_ns,
    "first_emit_ms": metrics.first_emit_ns,
    "decode_step_ms": metrics.decode_step_ns,
    "residual_ttft_ms": metrics.residual_ttft_ns,
    "residual_e2e_ms": metrics.residual_e2e_ns,
}
WORST = 10


def build_report(contract: Contract, run: CampaignRun, verdict: Verdict) -> dict[str, Any]:
    """The whole report. A pure function: the same contract and records give the same document."""
    runs = {part.profile: part for part in run.profiles}
    return {
        "schema": SCHEMA,
        "contract": {"name": contract.name, "revision": contract.revision, "sha256": contract.sha256},
        "verdict": {"status": verdict.status, "exit_code": verdict.exit_code, "reasons": list(verdict.reasons)},
        "run": {key: run.header.get(key) for key in ("run_id", "started", "salt")} | {"records_sha256": run.sha256},
        "identity": {**run.header.get("identity", {}), "checks": [vars(check) for check in verdict.identity]},
        "environment": run.header.get("environment", {}),
        "definitions": {name: " ".join(fn.__doc__.split()) for name, fn in DISTRIBUTIONS.items()},
        "profiles": [
            _profile(part, runs.get(part.profile.id, ProfileRun(part.profile.id, (), ()))) for part in verdict.profiles
        ],
    }


def _profile(verdict: ProfileVerdict, run: ProfileRun) -> dict[str, Any]:
    profile = verdict.profile
    measured = [record for record in run.records if record.measured]
    ok = [record for record in measured if record.status == OK]
    return {
        "id": profile.id,
        "status": verdict.status,
        "required": profile.required,
        "reasons": list(verdict.reasons),
        "schedule_sha256": schedule_sha256(build_schedule(profile)),
        "prompts_sha256": [shard.prompts_sha256 for shard in run.shards],
        "counts": dict(sorted(verdict.counts.items())),
        "errors": dict(sorted(Counter(f"{r.code}" for r in measured if r.status not in (OK, CANCELLED)).items())),
        "load": _load(profile, run, measured),
        "tokens": _tokens(ok),
        "objectives": [_objective(result, run.records) for result in verdict.results],
        "checks": [vars(check) for check in verdict.checks],
        "distributions": {name: distribution(ok, value) for name, value in DISTRIBUTIONS.items()},
        "server_counters": run.server,
        "special": special_parts(profile, run),
        "worst": [_waterfall(record) for record in worst(measured)],
    }


def distribution(records: Sequence[Record], value) -> dict[str, Any]:
    """Sample count, percentiles and maximum of a metric over requests that ended ok; None where there is no value."""
    values = [found for record in records if (found := value(record)) is not None]
    percentiles = {f"p{quantile * 100:g}": ms(percentile_ns(values, quantile)) for quantile in QUANTILES}
    return {"n": len(values), **percentiles, "max": ms(max(values, default=None))}


def _load(profile: Profile, run: ProfileRun, measured: Sequence[Record]) -> dict[str, Any]:
    chosen = [window for window in windows(profile.arrivals) if window.phase.measured]
    seconds = sum(window.end_ns - window.start_ns for window in chosen) / 1e9
    lags = [lag for shard in run.shards for lag in shard.lag_ns]
    samples = [count for shard in run.shards for _, count in shard.in_flight]
    means = [mean for shard in run.shards if (mean := mean_in_flight(shard)) is not None]
    issued = [record for record in measured if record.sent_ns is not None]
    tokens = sum(sum(metrics.tokens_in_slices(measured, w.start_ns, w.end_ns, 1)) for w in chosen)
    return {
        "measured_s": round(seconds, 3),
        "requested_rps": round(sum(w.phase.rate * w.phase.seconds for w in chosen) / seconds, 4),
        "achieved_rps": round(len(issued) / seconds, 4),
        "output_tokens_per_s": round(tokens / seconds, 3),
        "timer_lag_ms": {"p99": ms(percentile_ns(lags, 0.99)), "max": ms(max(lags, default=None))},
        "client_cpu": [round(shard.cpu_ns / shard.wall_ns, 4) for shard in run.shards if shard.wall_ns],
        "client_nice": [shard.nice for shard in run.shards],
        "in_flight": {"mean": round(sum(means), 3), "max_of_a_worker": max(samples, default=0)},
    }


def _tokens(ok: Sequence[Record]) -> dict[str, Any]:
    """What was asked for, what came, and the share of responses to tokens: 1 means one token a response."""
    received, responses = sum(record.received_tokens for record in ok), sum(len(record.chunks) for record in ok)
    told = [record.statistics for record in ok if record.statistics]
    return {
        "prompt": {"target": sum(r.prompt_tokens for r in ok), "server": sum(s["prompt_tokens"] for s in told)},
        "output": {"received": received, "server": sum(s["completion_tokens"] for s in told)},
        "cached": sum(s["cached_tokens"] for s in told),
        "preemptions": sum(s["preemptions"] for s in told),
        "batch_ratio": round(responses / received, 4) if received else None,
    }


def _objective(result: Result, records: Sequence[Record]) -> dict[str, Any]:
    row = dataclasses.asdict(result)
    objective = row.pop("objective")
    return {**objective, **row, "dominant_phase": dominant_phase(result.objective, records)}


def dominant_phase(objective: Objective, records: Sequence[Record]) -> str | None:
    """Where late requests lost their time, compared with those that met the limit; None unless TTFT or E2E was late."""
    if objective.metric not in ("ttft_ms", "e2e_ms"):
        return None
    found: dict[str, list[Record]] = {}
    for record in in_scope(objective, records):
        if record.statistics is not None:
            found.setdefault(outcome(record, objective), []).append(record)
    if not found.get(LATE):
        return None
    parts = {"client_delay": metrics.client_delay_ns, "queue": metrics.queue_ns, "prefill": metrics.prefill_ns}
    parts |= {"first_emit": metrics.first_emit_ns, "residual": metrics.residual_ttft_ns}
    if objective.metric == "e2e_ms":
        parts["decode"] = metrics.decode_ns

    def excess(name: str) -> float:
        means = [_mean([parts[name](r) for r in found.get(kind, [])]) for kind in (LATE, "met")]
        return means[0] - means[1]

    return max(parts, key=excess)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def worst(records: Sequence[Record]) -> list[Record]:
    """The requests that took longest, those that never ended ok first."""
    issued = [r for r in records if r.sent_ns is not None and r.end_ns is not None and r.status != CANCELLED]
    return sorted(issued, key=lambda r: (r.status == OK, r.scheduled_ns - r.end_ns, r.index))[:WORST]


def _waterfall(record: Record) -> dict[str, Any]:
    row = {"request_id": record.request_id, "phase": record.phase, "status": record.status, "code": record.code}
    row |= {"scheduled_ms": ms(record.scheduled_ns), "detail": record.detail, "tokens": record.received_tokens}
    names = (
        "client_delay_ms",
        "queue_ms",
        "prefill_ms",
        "first_emit_ms",
        "ttft_ms",
        "tpot_ms",
        "max_stall_ms",
        "e2e_ms",
    )
    return row | {name: ms(DISTRIBUTIONS[name](record)) for name in names}


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write canonical JSON."""
    path.write_bytes(canonical_json(report) + b"\n")

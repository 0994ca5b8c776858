"""A small contract, and made-up records of a known run: what the tests of the verifier judge."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtests.contract import Contract
from loadtests.records import ERROR, OK, CampaignRun, ProfileRun, Record, ShardReport
from loadtests.schedule import Slot, build_schedule, schedule_sha256
from loadtests.verdict import Verdict
from tritonforge.contract import STATISTICS

ROOT = Path(__file__).resolve().parents[2]
MS = 1_000_000
SECOND = 1_000 * MS

DOCUMENT: dict[str, Any] = {
    "schema": "tritonforge.contract/1",
    "name": "test",
    "revision": 1,
    "target": {"model": "llm"},
    "measurement": {"schedule_lag_p99_ms": 250, "residual_min_ms": -20},
    "profiles": [
        {
            "id": "small",
            "prompt_tokens": {"dist": "uniform", "min": 8, "max": 16},
            "output_tokens": {"dist": "constant", "value": 6},
            "data": {"seed": 3},
            "client": {"drain_s": 1.5, "idle_gap_s": 1.0, "deadline_s": 5.0},
            "arrivals": {
                "process": "poisson",
                "seed": 5,
                "phases": [
                    {"name": "warmup", "rate": 10.0, "seconds": 0.5, "measured": False},
                    {"name": "steady", "rate": 40.0, "seconds": 2.5},
                ],
            },
            "objectives": [
                {"id": "ttft", "metric": "ttft_ms", "quantile": 0.95, "le": 300},
                {"id": "tpot", "metric": "tpot_ms", "quantile": 0.95, "le": 100},
                {"id": "stall", "metric": "max_stall_ms", "quantile": 0.95, "le": 300},
                {"id": "e2e", "metric": "e2e_ms", "quantile": 0.95, "le": 1500},
                {"id": "errors", "metric": "error_ratio", "le": 0.05},
                {"id": "goodput", "metric": "compliance_ratio", "ge": 0.9},
                {"id": "rate", "metric": "output_tokens_per_s", "ge": 100},
            ],
        }
    ],
}


def to_toml(document: dict[str, Any]) -> str:
    """A TOML document with everything below the top in inline tables."""

    def value(item: Any) -> str:
        if isinstance(item, dict):
            return "{ " + ", ".join(f"{key} = {value(part)}" for key, part in item.items()) + " }"
        if isinstance(item, list):
            return "[" + ", ".join(map(value, item)) + "]"
        return json.dumps(item)

    return "".join(f"{key} = {value(item)}\n" for key, item in document.items())


def good_record(slot: Slot, *, first_ms: float = 30, gap_ms: float = 5) -> Record:
    """The record of an honest, prompt server: sent 1 ms late, one token a response, statistics that add up."""
    sent = slot.at_ns + MS
    times = [sent + round(first_ms * MS) + k * round(gap_ms * MS) for k in range(slot.output_tokens)]
    statistics = dict.fromkeys((tensor.name for tensor in STATISTICS), 0) | {
        "prompt_tokens": slot.prompt_tokens,
        "completion_tokens": slot.output_tokens,
        "queue_us": 2000,
        "prefill_us": round(first_ms * 1000) - 4000,
        "first_emit_us": 500,
        "decode_us": round(gap_ms * 1000) * (slot.output_tokens - 1),
        "decode_steps": slot.output_tokens - 1,
    }
    return Record(
        index=slot.index,
        request_id=f"r-{slot.index}",
        shard=0,
        phase=slot.phase,
        measured=slot.measured,
        scheduled_ns=slot.at_ns,
        prompt_tokens=slot.prompt_tokens,
        output_tokens=slot.output_tokens,
        status=OK,
        sent_ns=sent,
        end_ns=times[-1] + MS,
        chunks=tuple((at, 1) for at in times),
        finish_reason="length",
        statistics=statistics,
        model_version="1",
        tenant=slot.tenant,
        item=slot.item,
    )


def live_counter(records: list[Record], end_ns: int) -> tuple[tuple[int, int], ...]:
    """What a counter sampled every 50 ms would have seen."""
    issued = [(r.sent_ns, r.end_ns) for r in records if r.sent_ns is not None]
    return tuple((at, sum(sent <= at < end for sent, end in issued)) for at in range(0, end_ns, 50 * MS))


def make_run(contract: Contract, change: Callable[[Record], Record] = lambda record: record) -> CampaignRun:
    """A whole, honest campaign of every profile, each record passed through `change`."""
    parts = []
    for profile in contract.profiles:
        slots = build_schedule(profile)
        good = (replace(good_record(slot), request_id=f"r-{profile.id}-{slot.index}") for slot in slots)
        records = [change(record) for record in good]
        wall = slots[-1].at_ns + SECOND
        shard = ShardReport(
            shard=0,
            of=1,
            schedule_sha256=schedule_sha256(slots),
            prompts_sha256="p",
            requests=len(records),
            finished=True,
            wall_ns=wall,
            cpu_ns=wall // 10,
            lag_ns=(MS, MS, 2 * MS),
            in_flight=live_counter(records, wall),
        )
        counters = {"before": {"success": 7, "fail": 0}, "after": {"success": 7 + len(records), "fail": 0}}
        parts.append(ProfileRun(profile.id, (shard,), tuple(records), counters))
    header = {
        "format": 1,
        "run_id": "r",
        "contract_sha256": contract.sha256,
        "profiles": [p.id for p in contract.profiles],
    }
    return CampaignRun(header, tuple(parts))


def change_part(run: CampaignRun, **changes) -> CampaignRun:
    """The same campaign with its first profile changed."""
    return replace(run, profiles=(replace(run.profiles[0], **changes), *run.profiles[1:]))


def failing(record: Record, status: str = ERROR) -> Record:
    """The same request, ended without an answer."""
    return replace(record, status=status, code="X", chunks=(), statistics=None)


def statuses(verdict: Verdict) -> dict[str, str]:
    """The status of each objective of the first profile."""
    return {result.objective.id: result.status for result in verdict.profiles[0].results}


def broken(verdict: Verdict) -> list[str]:
    """The broken checks of the first profile."""
    return [check.name for check in verdict.profiles[0].checks if check.ok is False]


def delayed(record: Record, milliseconds: int) -> Record:
    """The same answer, later: the server's own account says that it queued."""
    late = milliseconds * MS
    statistics = {**record.statistics, "queue_us": record.statistics["queue_us"] + milliseconds * 1000}
    chunks = tuple((at + late, count) for at, count in record.chunks)
    return replace(record, chunks=chunks, end_ns=record.end_ns + late, statistics=statistics)

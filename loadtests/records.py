"""Raw records of a campaign: one per request, made by the load generator, read by the verdict.

All times are integer nanoseconds of the worker's monotonic clock since the start of its schedule; only durations leave
a machine. Their files are those of raw_files.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from loadtests.fields import InvalidContract
from tritonforge.contract import STATISTICS

FORMAT = 1
OK, ERROR, TIMEOUT, SHED, CENSORED, NOT_ISSUED = "ok", "error", "timeout", "shed", "censored", "not_issued"
CANCELLED = "cancelled"
STATUSES = (OK, ERROR, TIMEOUT, SHED, CENSORED, NOT_ISSUED, CANCELLED)
"""ok: complete. error: failed, truncated or empty. timeout: silent too long, or past its deadline. shed: refused as
overloaded. censored: still open when the drain ended. not_issued: never sent, the in-flight guard was reached.
cancelled: ended because the schedule wanted it cancelled; no other promise counts it."""


OPTIONAL = ("tenant", "item", "cancel_ns", "attempts", "answer")
"""Left out of a line when they say nothing."""


class InvalidRecords(InvalidContract):
    """A raw file that no version of this format could have written."""


@dataclass(frozen=True)
class Record:
    """One request: what the schedule wanted, when it was sent, when tokens came, how it ended.

    `chunks` are (time in ns, number of tokens) of each response that carried tokens. `prompt_tokens` and
    `output_tokens` are the schedule's targets; `statistics` is the server's own account from the last response.
    `cancel_ns` is when the client asked to cancel it. `attempts` are (sent_ns, end_ns, status) of the tries before the
    last one, when it was retried; `sent_ns` and all that follows belong to the last. `answer` is kept for quality.
    """

    index: int
    request_id: str
    shard: int
    phase: str
    measured: bool
    scheduled_ns: int
    prompt_tokens: int
    output_tokens: int
    status: str
    sent_ns: int | None = None
    end_ns: int | None = None
    chunks: tuple[tuple[int, int], ...] = ()
    code: str | None = None
    detail: str | None = None
    finish_reason: str | None = None
    statistics: dict[str, int] | None = None
    model_version: str | None = None
    tenant: str = ""
    item: str = ""
    cancel_ns: int | None = None
    attempts: tuple[tuple[int, int, str], ...] = ()
    answer: str | None = None

    @property
    def received_tokens(self) -> int:
        return sum(count for _, count in self.chunks)


@dataclass(frozen=True)
class ShardReport:
    """One worker's share of a profile, and the worker's own health while it ran.

    `lag_ns` are how late a 50 ms timer fired; `in_flight` are (time in ns, open requests) samples of a live counter;
    `requests` is the number of request lines written before the end, `nice` the worker's scheduling priority.
    `t0_ns` is the start on the worker's monotonic clock, `start_late_ns` how long after the common one that was;
    `fault_ns` is when it did the profile's fault, if it did. `contract_sha256` is of the contract that it read.
    """

    shard: int
    of: int
    schedule_sha256: str
    prompts_sha256: str
    requests: int
    finished: bool
    wall_ns: int
    cpu_ns: int
    lag_ns: tuple[int, ...]
    in_flight: tuple[tuple[int, int], ...]
    nice: int = 0
    t0_ns: int = 0
    fault_ns: int | None = None
    start_late_ns: int = 0
    contract_sha256: str = ""


@dataclass(frozen=True)
class ProfileRun:
    """Everything recorded of one profile. `server` holds what the target told before and after, or None: its counters
    and, where they were asked for, `gauges`, and the digest of the `release` that it serves."""

    profile: str
    shards: tuple[ShardReport, ...]
    records: tuple[Record, ...]
    server: dict[str, Any] | None = None


@dataclass(frozen=True)
class CampaignRun:
    """A whole campaign: its `header` (contract hash, identity, environment, salt) and its profiles.

    `sha256` is of the records that were read, when they end with the seal of the campaign; else None.
    """

    header: dict[str, Any]
    profiles: tuple[ProfileRun, ...]
    sha256: str | None = None


def encode_record(profile: str, record: Record) -> str:
    """One line of JSON; chunk times are written as differences, the first from the scheduled time."""
    line = {"kind": "request", "profile": profile, **dataclasses.asdict(record)}
    previous, deltas = record.scheduled_ns, []
    for at, count in record.chunks:
        deltas.append([at - previous, count])
        previous = at
    line["chunks"] = deltas
    line = {key: value for key, value in line.items() if key not in OPTIONAL or value not in ("", None, ())}
    return json.dumps(line, separators=(",", ":"))


def complete_statistics(statistics: dict[str, int] | None) -> dict[str, int] | None:
    """The server's account of an answer, or None when a tensor of it is missing: a part of it accounts for nothing."""
    if statistics is None or any(not _is_int(statistics.get(tensor.name)) for tensor in STATISTICS):
        return None
    return statistics


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def decode_record(line: dict[str, Any]) -> Record:
    """The inverse of encode_record. Raises ValueError, KeyError or TypeError for what it does not write."""
    values = {key: value for key, value in line.items() if key not in ("kind", "profile")}
    at, chunks = values["scheduled_ns"], []
    for delta, count in values["chunks"]:
        at += delta
        chunks.append((at, count))
    attempts = tuple(tuple(attempt) for attempt in values.get("attempts", ()))
    record = Record(**{**values, "chunks": tuple(chunks), "attempts": attempts})
    times = [value for value in (record.sent_ns, record.end_ns, record.cancel_ns) if value is not None]
    times += [value for sent, end, _ in attempts for value in (sent, end)]
    counts = (record.index, record.shard, record.scheduled_ns, record.prompt_tokens, record.output_tokens)
    if not all(map(_is_int, (*counts, *times, *(value for chunk in chunks for value in chunk)))):
        raise ValueError("times and counts must be integers")
    if record.status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {record.status!r}")
    if record.statistics is not None and complete_statistics(record.statistics) is None:
        names = ", ".join(tensor.name for tensor in STATISTICS)
        raise ValueError(f"statistics must be null or hold an integer for each of {names}")
    return record

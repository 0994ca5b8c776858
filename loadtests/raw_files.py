"""The files of raw records: shard files of the workers, and raw.jsonl, which joins them.

A worker writes one shard file: a `shard` line, a `request` line per request, a `shard_end` line with what it saw
of itself. `merge` joins them into raw.jsonl between a `campaign` line and a `seal`; `read_run` reads that.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loadtests.records import (
    FORMAT,
    CampaignRun,
    InvalidRecords,
    ProfileRun,
    Record,
    ShardReport,
    decode_record,
    encode_record,
)


class ShardWriter:
    """Appends one worker's records to its file. `finish` writes the end line; a file without one is a lost worker."""

    def __init__(self, path: Path, profile: str, shard: int, of: int, **digests: str):
        """`digests`: schedule_sha256, prompts_sha256 and contract_sha256."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._profile = profile
        self.requests = 0
        self._head = {
            "shard": shard,
            "of": of,
            **digests,
        }
        self._write({"kind": "shard", "profile": profile, **self._head})
        self._file.flush()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def request(self, record: Record) -> None:
        self._file.write(encode_record(self._profile, record) + "\n")
        self.requests += 1

    def finish(self, **health: Any) -> None:
        """Write the end line with the worker's health (finished, wall_ns, cpu_ns, lag_ns, in_flight); close."""
        line = {"kind": "shard_end", "profile": self._profile, **self._head, "requests": self.requests, **health}
        self._write(line)
        self._file.close()


def shard_path(folder: Path, profile: str, shard: int) -> Path:
    """Where worker `shard` of a campaign in `folder` writes the records of a profile."""
    return folder / "raw" / f"{profile}.{shard}.jsonl"


def merge(folder: Path, header: dict[str, Any], profiles: Iterable[str], server: dict[str, Any]) -> Path:
    """Join the shard files of `profiles` into folder/raw.jsonl: shards in order, requests sorted by index.

    Files that are missing or cut short are merged as they are: the verdict sees which end lines are absent. The last
    line is a seal, the sha256 of all before it: what is changed or lost afterwards is noticed.
    """
    target = folder / "raw.jsonl"
    with target.open("w", encoding="utf-8") as file:
        head = {"kind": "campaign", "format": FORMAT, "sealed": True, **header}
        file.write(json.dumps(head, separators=(",", ":")) + "\n")
        for profile in profiles:
            lines: dict[str, list[tuple[int, str]]] = {"shard": [], "request": [], "shard_end": []}
            for path in sorted((folder / "raw").glob(f"{profile}.*.jsonl")):
                for text, line in _lines(path, cut_short=True):
                    lines[line["kind"]].append((line.get("index", line.get("shard")), text))
            for kind in lines:
                file.writelines(text + "\n" for _, text in sorted(lines[kind], key=lambda pair: pair[0]))
            if server.get(profile) is not None:
                facts = {"kind": "server", "profile": profile, "counters": server[profile]}
                file.write(json.dumps(facts, separators=(",", ":")) + "\n")
    with target.open("ab") as file:
        file.write(_seal(target.read_bytes()))
    return target


def _seal(data: bytes) -> bytes:
    return json.dumps({"kind": "seal", "sha256": hashlib.sha256(data).hexdigest()}).encode() + b"\n"


def _sealed_sha256(path: Path) -> str | None:
    """The sha256 of a raw file without its seal, when the last line is the seal of all before it."""
    data = path.read_bytes()
    start = data.rstrip(b"\n").rfind(b"\n") + 1
    return hashlib.sha256(data[:start]).hexdigest() if data[start:] == _seal(data[:start]) else None


def _lines(path: Path, *, cut_short: bool = False) -> Iterable[tuple[str, dict[str, Any]]]:
    """(text, value) of each line; with `cut_short`, an unfinished last line (a killed worker's) is left out."""
    texts = path.read_text(encoding="utf-8").split("\n")
    for number, text in enumerate(texts, 1):
        if not text:
            continue
        try:
            yield text, json.loads(text)
        except json.JSONDecodeError as error:
            if cut_short and number == len(texts):
                return
            raise InvalidRecords(f"{path} line {number} is not JSON: {error}") from error


def read_run(path: Path) -> CampaignRun:
    """Read raw.jsonl. Raises InvalidRecords when it is missing, of another format, or not what `merge` writes."""
    header: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    number = 0
    try:
        for number, (_, line) in enumerate(_lines(path), 1):
            kind = line.pop("kind")
            if kind == "campaign":
                header = line
            if kind in ("campaign", "seal"):
                continue
            part = found.setdefault(line["profile"], {"shards": [], "records": [], "server": None})
            if kind == "request":
                part["records"].append(decode_record(line))
            elif kind == "shard_end":
                part["shards"].append(_shard_report(line))
            elif kind == "server":
                part["server"] = line["counters"]
            elif kind != "shard":
                raise InvalidRecords(f"{path} line {number} is of unknown kind {kind!r}")
    except OSError as error:
        raise InvalidRecords(f"records {path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InvalidRecords(f"{path} line {number} is not a line of this format: {error!r}") from error
    if header.get("format") != FORMAT:
        raise InvalidRecords(f"{path} must start with a campaign line of format {FORMAT}, got {header.get('format')!r}")
    profiles = (
        ProfileRun(profile, tuple(part["shards"]), tuple(part["records"]), part["server"])
        for profile, part in found.items()
    )
    return CampaignRun(header, tuple(profiles), _sealed_sha256(path))


def _shard_report(line: dict[str, Any]) -> ShardReport:
    values = {key: value for key, value in line.items() if key != "profile"}
    samples = tuple((at, count) for at, count in values["in_flight"])
    numbers = [values[key] for key in ("shard", "of", "requests", "wall_ns", "cpu_ns")]
    if not all(isinstance(number, int) for number in (*numbers, *values["lag_ns"], *itertools.chain(*samples))):
        raise ValueError("counts and times of a shard must be integers")
    return ShardReport(**{**values, "lag_ns": tuple(values["lag_ns"]), "in_flight": samples})

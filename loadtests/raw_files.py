"""The files of raw records: shard files of the workers, and raw.jsonl, which joins them.

A worker writes one shard file: a `shard` line, a `request` line per request, a `shard_end` line with what it saw
of itself. `merge` joins them into raw.jsonl behind a `campaign` line; `read_run` reads that.
"""

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

    def __init__(self, path: Path, profile: str, shard: int, of: int, *, schedule_sha256: str, prompts_sha256: str):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._profile = profile
        self.requests = 0
        self._head = {
            "shard": shard,
            "of": of,
            "schedule_sha256": schedule_sha256,
            "prompts_sha256": prompts_sha256,
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

    Files that are missing or cut short are merged as they are: the verdict sees which end lines are absent.
    """
    target = folder / "raw.jsonl"
    with target.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "campaign", "format": FORMAT, **header}, separators=(",", ":")) + "\n")
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
    return target


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
    return CampaignRun(header, tuple(profiles))


def _shard_report(line: dict[str, Any]) -> ShardReport:
    values = {key: value for key, value in line.items() if key != "profile"}
    samples = tuple((at, count) for at, count in values["in_flight"])
    return ShardReport(**{**values, "lag_ns": tuple(values["lag_ns"]), "in_flight": samples})

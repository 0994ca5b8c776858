"""The audit: one line of JSON for every request that had a valid key, in one file a day (UTC), kept for some days.

It has sizes, durations and outcome; what was said only of a tenant that wants it (audit_content), after the filters.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from tritonforge.gateway.accounting.records import Record


def line_of(record: Record) -> dict[str, Any]:
    """The line's object; absent: content of a tenant that does not want it kept."""
    line = asdict(record)
    started = datetime.fromtimestamp(line.pop("started"), UTC)
    content = line.pop("content")
    for name in ("first_token_ms", "duration_ms"):
        line[name] = None if line[name] is None else round(line[name], 3)
    told = {"time": started.isoformat(timespec="milliseconds")} | line
    return told | ({"content": content} if content is not None else {})


class AuditFiles:
    """The folder of files `audit-2026-11-30.jsonl`; only their owner may read them."""

    def __init__(self, folder: Path, retention_days: int) -> None:
        """Raises OSError when the folder cannot be written."""
        self._folder, self._retention = folder, timedelta(days=retention_days)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._expired_on: date | None = None
        self.write([])
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")

    def write(self, records: Iterable[Record]) -> None:
        """Append each record to the file of the day on which it began; remove files that are too old."""
        lines: dict[date, list[str]] = {}
        for record in records:
            day = datetime.fromtimestamp(record.started, UTC).date()
            lines.setdefault(day, []).append(json.dumps(line_of(record), ensure_ascii=False) + "\n")
        for day, found in lines.items():
            handle = os.open(self.path_of(day), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(handle, "a", encoding="utf-8", errors="surrogatepass") as file:
                file.write("".join(found))
        self.expire(datetime.now(UTC).date())

    def path_of(self, day: date) -> Path:
        """The file of one day."""
        return self._folder / f"audit-{day.isoformat()}.jsonl"

    def expire(self, today: date) -> None:
        """Remove the files of days that ended more than the retention ago; looks once a day."""
        if self._expired_on == today:
            return
        self._expired_on = today
        for path in self._folder.glob("audit-????-??-??.jsonl"):
            try:
                day = date.fromisoformat(path.stem.removeprefix("audit-"))
            except ValueError:
                continue
            if today - day > self._retention:
                path.unlink(missing_ok=True)

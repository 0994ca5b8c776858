"""The audit: one line of JSON for every request that had a valid key, in one file a day (UTC), kept for some days.

It has sizes, durations and outcome; what was said only of a tenant that wants it (audit_content), after the filters.
"""

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from tritonforge.gateway.accounting.records import Record

log = logging.getLogger(__name__)


def line_of(record: Record) -> dict[str, Any]:
    """The line's object; absent: content of a tenant that does not want it kept."""
    line = asdict(record)
    started = datetime.fromtimestamp(line.pop("started"), UTC)
    content = line.pop("content")
    del line["sampled"]
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
        """Append each record to the file of the day on which it began; remove files that are too old.

        All records or, with an OSError, none: no half line of a full disk stays.
        """
        lines: dict[date, list[str]] = {}
        for record in records:
            day = datetime.fromtimestamp(record.started, UTC).date()
            lines.setdefault(day, []).append(json.dumps(line_of(record), ensure_ascii=False) + "\n")
        with contextlib.ExitStack() as stack:
            files = [(stack.enter_context(_appending(self.path_of(day))), found) for day, found in lines.items()]
            sizes = [os.fstat(file).st_size for file, _ in files]
            try:
                for file, found in files:
                    _append(file, "".join(found).encode("utf-8", "surrogatepass"))
            except OSError:
                for (file, _), size in zip(files, sizes, strict=True):
                    os.ftruncate(file, size)
                raise
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
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:  # what was written stays written
                    log.error("%s of the audit is too old and cannot be removed: %s", path, error)


@contextlib.contextmanager
def _appending(path: Path) -> Iterator[int]:
    """The open file, and nobody else who appends to it."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _append(file: int, left: bytes) -> None:
    """Write it whole, on a line of its own: a killed process may have left half of one."""
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        left = b"\n" + left
    while left:
        left = left[os.write(file, left) :]

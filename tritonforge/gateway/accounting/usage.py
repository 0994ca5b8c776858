"""Usage by tenant, model and day of UTC, with its cost, in SQLite: written by the gateway, printed by a command.

The cost is fixed when a request ends: a later price changes nothing that was used before.
"""

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from tritonforge.errors import NotFound
from tritonforge.gateway.accounting.config import Price
from tritonforge.gateway.accounting.records import Record

BUSY_S = 10.0
_TABLE = """
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL, served_model TEXT NOT NULL,
    requests INTEGER NOT NULL, failed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    cost_nano INTEGER NOT NULL, unpriced INTEGER NOT NULL,
    PRIMARY KEY (day, tenant, model, served_model)
) WITHOUT ROWID
"""
_COUNTS = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nano", "unpriced")
_ADD = f"""
INSERT INTO usage VALUES (?, ?, ?, ?, {", ".join("?" * len(_COUNTS))})
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in _COUNTS)}
"""


@dataclass(frozen=True)
class Usage:
    """What a tenant used of a model on a day. `unpriced` are requests with tokens whose model had no price."""

    day: str
    tenant: str
    model: str
    served_model: str
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nano: int
    unpriced: int

    @property
    def cost(self) -> float:
        """In the currency."""
        return self.cost_nano / 1e9


class UsageFile:
    """The file. Several gateways of one machine may write to it."""

    def __init__(self, path: Path, prices: Mapping[str, Price], retention_days: int | None = None) -> None:
        """Raises OSError or sqlite3.Error when it cannot be written."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path, self._prices, self._retention_days = path, prices, retention_days
        with closing(self._connect()) as connection, connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(_TABLE)

    def write(self, records: Iterable[Record]) -> None:
        """Add the records, all or none."""
        rows = [self._row(record) for record in records]
        with closing(self._connect()) as connection, connection:
            connection.executemany(_ADD, rows)
            if self._retention_days is not None:
                oldest = datetime.now(UTC).date() - timedelta(days=self._retention_days)
                connection.execute("DELETE FROM usage WHERE day < ?", (oldest.isoformat(),))

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=BUSY_S)

    def _row(self, record: Record) -> tuple:
        served = record.served_model or record.model
        price = self._prices.get(served) or self._prices.get(record.model)
        tokens = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
        day = datetime.fromtimestamp(record.started, UTC).date().isoformat()
        cost = price.nano(*tokens) if price else 0
        unpriced = int(price is None and record.prompt_tokens + record.completion_tokens > 0)
        return (day, record.tenant, record.model, served, 1, int(record.outcome != "ok"), *tokens, cost, unpriced)


def read_usage(
    path: Path, tenant: str | None = None, since: date | None = None, until: date | None = None
) -> list[Usage]:
    """By day, tenant and model. `until` is included. Raises NotFound when there is no such file of usage."""
    if not path.is_file():
        raise NotFound(f"there is no usage at {path}; the gateway writes it, see [usage] of its configuration")
    wanted = {"tenant = ?": tenant, "day >= ?": since and since.isoformat(), "day <= ?": until and until.isoformat()}
    where = " AND ".join(rule for rule, value in wanted.items() if value is not None) or "1"
    values = [value for value in wanted.values() if value is not None]
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            query = f"SELECT * FROM usage WHERE {where} ORDER BY day, tenant, model, served_model"
            return [Usage(*row) for row in connection.execute(query, values)]
    except sqlite3.DatabaseError as error:
        raise NotFound(f"{path} is no file of usage: {error}") from None

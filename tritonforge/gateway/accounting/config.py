"""The tables of gateway.toml about what is kept of requests: [audit], [usage], [prices] and [metrics]."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritonforge.errors import InvalidRequest
from tritonforge.gateway.tables import check_number, read_into, secret_of, table_of


def state_folder() -> Path:
    """Where audit and usage are kept without a configuration: $XDG_STATE_HOME/tritonforge, in ~/.local/state else."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "tritonforge"


@dataclass(frozen=True)
class AuditTable:
    """[audit]: one file a day in `folder`, each removed `retention_days` after its day."""

    enabled: bool = True
    folder: str | None = None
    retention_days: int = 30

    def __post_init__(self) -> None:
        _check_switch("[audit]", self.enabled, "folder", self.folder)
        if type(self.retention_days) is not int or self.retention_days < 1:
            raise InvalidRequest(f"retention_days of [audit] must be 1 or more, got {self.retention_days!r}")


@dataclass(frozen=True)
class UsageTable:
    """[usage]: the SQLite file; days are kept until `retention_days` (None: for ever). `currency` is that of prices."""

    enabled: bool = True
    file: str | None = None
    retention_days: int | None = None
    currency: str = "USD"

    def __post_init__(self) -> None:
        _check_switch("[usage]", self.enabled, "file", self.file)
        if not isinstance(self.currency, str) or not self.currency:
            raise InvalidRequest(f"currency of [usage] must be a name, got {self.currency!r}")
        if self.retention_days is not None and (type(self.retention_days) is not int or self.retention_days < 1):
            raise InvalidRequest(f"retention_days of [usage] must be 1 or more, got {self.retention_days!r}")


@dataclass(frozen=True)
class Price:
    """[prices.MODEL]: of a million tokens; `cached` of those prompt tokens that were in the prefix cache."""

    model: str
    prompt: float
    completion: float
    cached: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "completion", "cached"):
            check_number(f"[prices.{self.model}]", name, getattr(self, name), least=-1e-12, optional=name == "cached")

    def nano(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """The cost in billionths of the currency."""
        cached = self.prompt if self.cached is None else self.cached
        fresh = prompt_tokens - cached_tokens
        return round((fresh * self.prompt + cached_tokens * cached + completion_tokens * self.completion) * 1000)


@dataclass(frozen=True)
class MetricsTable:
    """[metrics]: who may read /metrics of the API's port: who has the token in the variable `token_env`, or nobody."""

    token_env: str | None = None

    def __post_init__(self) -> None:
        if self.token_env is not None and not (isinstance(self.token_env, str) and self.token_env):
            raise InvalidRequest(f"token_env of [metrics] must be a variable's name, got {self.token_env!r}")

    @property
    def token(self) -> str | None:
        """What a scraper must send as its Bearer token. Raises SetupError when the variable is not set."""
        if self.token_env is None:
            return None
        return secret_of("[metrics] needs its token", self.token_env)


@dataclass(frozen=True)
class RecordsConfig:
    """All four tables."""

    audit: AuditTable = field(default_factory=AuditTable)
    usage: UsageTable = field(default_factory=UsageTable)
    prices: Mapping[str, Price] = field(default_factory=dict)
    metrics: MetricsTable = field(default_factory=MetricsTable)

    TABLES = ("audit", "usage", "prices", "metrics")

    @classmethod
    def of_tables(cls, content: Mapping[str, Any]) -> "RecordsConfig":
        """From the parsed TOML."""
        prices = table_of(content, "prices")
        return cls(
            read_into(AuditTable, "[audit]", table_of(content, "audit")),
            read_into(UsageTable, "[usage]", table_of(content, "usage")),
            {
                name: read_into(Price, f"[prices.{name}]", table_of(prices, name, "prices."), model=name)
                for name in prices
            },
            read_into(MetricsTable, "[metrics]", table_of(content, "metrics")),
        )


def _check_switch(where: str, enabled: Any, name: str, path: Any) -> None:
    if type(enabled) is not bool:
        raise InvalidRequest(f"enabled of {where} must be true or false, got {enabled!r}")
    if path is not None and not (isinstance(path, str) and path):
        raise InvalidRequest(f"{name} of {where} must be a path, got {path!r}")

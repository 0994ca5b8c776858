"""gateway.toml: what tenants may do, and the limits of the edge itself. Read once, at the start.

Unknown tables and keys are errors. A tenant without a table of its own has the values of [defaults].
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tritonforge.errors import InvalidRequest
from tritonforge.gateway.accounting.config import RecordsConfig
from tritonforge.gateway.filtering.config import Filter, read_filters
from tritonforge.gateway.routing.config import RoutingConfig
from tritonforge.gateway.tables import read_into, refuse_unknown, table_of
from tritonforge.options import DEFAULT_PRIORITY, PRIORITIES


@dataclass(frozen=True)
class Tenant:
    """What one tenant may do; None means no limit. `models` None: all of them.

    `requests_per_minute` counts in every 60 s; tokens, prompt and answer together, by the minute and the day of UTC.
    """

    name: str = ""
    priority_class: int = DEFAULT_PRIORITY
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    concurrent_requests: int | None = None
    models: tuple[str, ...] | None = None
    audit_content: bool = False
    """Whether the audit keeps its prompts and answers."""

    def __post_init__(self) -> None:
        where = f"tenant {self.name!r}" if self.name else "[defaults]"
        if type(self.priority_class) is not int or not 0 <= self.priority_class < PRIORITIES:
            raise InvalidRequest(
                f"priority_class of {where} must be in [0, {PRIORITIES - 1}], got {self.priority_class!r}"
            )
        for name in ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "concurrent_requests"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidRequest(f"{name} of {where} must be an integer of 1 or more, got {value!r}")
        if type(self.audit_content) is not bool:
            raise InvalidRequest(f"audit_content of {where} must be true or false, got {self.audit_content!r}")
        if self.models is not None and not all(isinstance(model, str) for model in self.models):
            raise InvalidRequest(f"models of {where} must be a list of names, got {self.models!r}")


@dataclass(frozen=True)
class EdgeLimits:
    """[edge]: limits of the edge itself. `storage` is memory, or the URL of a Redis that several gateways share."""

    storage: str = "memory"
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    slow_client_s: float = 10.0
    """A client that takes nothing for so long, with the buffers full, is left."""
    max_prompts: int = 32
    """Prompts of one completions request."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            number = type(value) in (int, float) and value > 0 and not (one.type is int and type(value) is float)
            if one.name == "storage":
                number = isinstance(value, str) and (value == "memory" or value.startswith(("redis://", "rediss://")))
            if not number:
                rule = "memory or redis://..." if one.name == "storage" else "a number above 0"
                raise InvalidRequest(f"{one.name} of [edge] must be {rule}, got {value!r}")


@dataclass(frozen=True)
class GatewayConfig:
    """The whole file."""

    defaults: Tenant = field(default_factory=Tenant)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    edge: EdgeLimits = field(default_factory=EdgeLimits)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    records: RecordsConfig = field(default_factory=RecordsConfig)
    filters: tuple[Filter, ...] = field(default_factory=lambda: read_filters({}))

    @classmethod
    def read(cls, path: Path | None) -> "GatewayConfig":
        """The configuration in `path`, the built-in one without a path. Raises InvalidRequest naming table and key."""
        if path is None:
            return cls()
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{path} cannot be read: {error}") from None
        return cls.of_tables(content)

    @classmethod
    def of_tables(cls, content: Mapping[str, Any]) -> "GatewayConfig":
        """From the parsed TOML."""
        refuse_unknown(
            "gateway.toml",
            content,
            ("defaults", "tenants", "edge", *RoutingConfig.TABLES, *RecordsConfig.TABLES, "filters"),
        )
        defaults = _tenant(Tenant(), "", table_of(content, "defaults"))
        tenants = {
            name: _tenant(defaults, name, table_of(content["tenants"], name)) for name in table_of(content, "tenants")
        }
        edge = read_into(EdgeLimits, "[edge]", table_of(content, "edge"))
        return cls(
            defaults,
            tenants,
            edge,
            RoutingConfig.of_tables(content),
            RecordsConfig.of_tables(content),
            read_filters(content),
        )

    def tenant(self, name: str) -> Tenant:
        """What the tenant `name` may do."""
        return self.tenants.get(name) or replace(self.defaults, name=name)


def _tenant(defaults: Tenant, name: str, table: Mapping[str, Any]) -> Tenant:
    where = f"[tenants.{name}]" if name else "[defaults]"
    refuse_unknown(where, table, [one.name for one in fields(Tenant) if one.name != "name"])
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return replace(defaults, name=name, **values)

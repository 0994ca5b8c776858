"""The tables of gateway.toml that say where requests go: [models], [managed], [aliases] and [routing]."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritonforge.errors import InvalidRequest
from tritonforge.gateway.routing.breaker import BreakerPolicy
from tritonforge.gateway.tables import check_names, check_number, read_into, table_of

REASONS = ("unavailable", "failed", "timeout")
"""Why another place is asked: it takes no requests or nobody is there; it failed; its first token is late."""
RELEASES = ("stable", "canary")
_URL = re.compile(r"[A-Za-z0-9.\-\[\]:]+:\d{1,5}")


@dataclass(frozen=True)
class ModelTable:
    """[models.NAME]: replicas of one release, by the host:port of their gRPC endpoints; `release` is its folder."""

    name: str
    replicas: tuple[str, ...]
    release: str | None = None

    def __post_init__(self) -> None:
        where = f"[models.{self.name}]"
        check_names(where, "replicas", self.replicas)
        if not self.replicas or not all(_URL.fullmatch(url.removeprefix("grpc://")) for url in self.replicas):
            raise InvalidRequest(f"replicas of {where} must be a list of host:port, got {list(self.replicas)}")
        if len(set(self.replicas)) != len(self.replicas):
            raise InvalidRequest(f"replicas of {where} must differ, got {list(self.replicas)}")
        if self.release is not None and not isinstance(self.release, str):
            raise InvalidRequest(f"release of {where} must be a folder, got {self.release!r}")


@dataclass(frozen=True)
class ManagedTable:
    """[managed.NAME]: an OpenAI-compatible API of somebody else. `key_env` names the variable that holds its key.

    With `tenants`, only their requests may go there.
    """

    name: str
    base_url: str
    model: str
    key_env: str | None = None
    tenants: tuple[str, ...] | None = None
    connect_s: float = 5.0

    def __post_init__(self) -> None:
        where = f"[managed.{self.name}]"
        if not isinstance(self.base_url, str) or not self.base_url.startswith(("http://", "https://")):
            raise InvalidRequest(f"base_url of {where} must be a URL of HTTP, got {self.base_url!r}")
        for name in ("model", "key_env"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and not (name == "key_env" and value is None):
                raise InvalidRequest(f"{name} of {where} must be a name, got {value!r}")
        if self.tenants is not None:
            check_names(where, "tenants", self.tenants)
        check_number(where, "connect_s", self.connect_s)


@dataclass(frozen=True)
class Alias:
    """[aliases.NAME]: a name for clients, and the policy for its requests.

    `models` is one name, or shares by name that add up to 1; `pins` has tenants whose model is fixed, `releases` those
    that always get a server's stable or canary release. `fallback` names what is asked in turn when the model cannot
    answer, for the reasons in `retry_on`, which also allow another replica: `max_tries` at those of each model. In
    seconds: `first_token_s` of a streamed answer per try, `gap_s` between its chunks, `deadline_s` of the whole request
    (None: none).
    """

    name: str
    models: str | Mapping[str, float]
    pins: Mapping[str, str] = field(default_factory=dict)
    releases: Mapping[str, str] = field(default_factory=dict)
    fallback: tuple[str, ...] = ()
    retry_on: tuple[str, ...] = REASONS
    max_tries: int = 3
    first_token_s: float | None = 60.0
    gap_s: float | None = 60.0
    deadline_s: float | None = None
    formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"[aliases.{self.name}]"
        for name in ("fallback", "retry_on", "formats"):
            check_names(where, name, getattr(self, name))
        for reason in self.retry_on:
            if reason not in REASONS:
                raise InvalidRequest(f"retry_on of {where} must be of {', '.join(REASONS)}, got {reason!r}")
        if type(self.max_tries) is not int or self.max_tries < 1:
            raise InvalidRequest(f"max_tries of {where} must be an integer of 1 or more, got {self.max_tries!r}")
        for name in ("first_token_s", "gap_s", "deadline_s"):
            check_number(where, name, getattr(self, name), optional=True)
        for name in ("pins", "releases"):
            value = getattr(self, name)
            if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
                raise InvalidRequest(f"{name} of {where} must be a table of names by tenant, got {value!r}")
        for release in self.releases.values():
            if release not in RELEASES:
                raise InvalidRequest(f"releases of {where} must be stable or canary, got {release!r}")
        self._check_shares(where)

    def _check_shares(self, where: str) -> None:
        shares = self.models if isinstance(self.models, dict) else {self.models: 1.0}
        numbers = [value for value in shares.values() if type(value) in (int, float) and 0 <= value <= 1]
        if (
            len(numbers) != len(shares)
            or abs(sum(numbers) - 1) > 1e-9
            or not all(isinstance(one, str) for one in shares)
        ):
            raise InvalidRequest(f"models of {where} must be a name, or shares that add up to 1, got {self.models!r}")

    @property
    def shares(self) -> Mapping[str, float]:
        """Share by model."""
        return {self.models: 1.0} if isinstance(self.models, str) else self.models


@dataclass(frozen=True)
class RoutingLimits:
    """[routing]: how replicas are watched and chosen.

    A replica is asked every `health_s` seconds whether it is ready. One that has seen the prompt's beginning is
    preferred while it has at most `affinity_slack` more requests than the least busy one. The others are a breaker's.
    """

    health_s: float = 1.0
    affinity_slack: int = 4
    failures: int = 3
    open_s: float = 2.0
    most_open_s: float = 60.0

    def __post_init__(self) -> None:
        check_number("[routing]", "health_s", self.health_s)
        if type(self.affinity_slack) is not int or self.affinity_slack < 0:
            raise InvalidRequest(f"affinity_slack of [routing] must be 0 or more, got {self.affinity_slack!r}")
        _ = self.breaker

    @property
    def breaker(self) -> BreakerPolicy:
        """Of each replica and managed API."""
        return BreakerPolicy(self.failures, self.open_s, self.most_open_s)


@dataclass(frozen=True)
class RoutingConfig:
    """All four tables. A model's name is an alias of itself, unless there is one of that name."""

    models: Mapping[str, ModelTable] = field(default_factory=dict)
    managed: Mapping[str, ManagedTable] = field(default_factory=dict)
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    limits: RoutingLimits = field(default_factory=RoutingLimits)

    TABLES = ("models", "managed", "aliases", "routing")

    @classmethod
    def of_tables(cls, content: Mapping[str, Any]) -> "RoutingConfig":
        """From the parsed TOML; names that are no model's are refused."""
        models = _named(ModelTable, "models", content)
        managed = _named(ManagedTable, "managed", content)
        aliases = _named(Alias, "aliases", content)
        if both := models.keys() & managed.keys():
            raise InvalidRequest(f"[managed.{min(both)}] must have another name than the model")
        for alias in aliases.values() if models else ():
            check_alias(alias, models, managed)
        return cls(models, managed, aliases, read_into(RoutingLimits, "[routing]", table_of(content, "routing")))


def check_alias(alias: Alias, models: Mapping[str, Any], managed: Mapping[str, Any]) -> None:
    """Raise InvalidRequest when the alias names something that is not there."""
    where = f"[aliases.{alias.name}]"
    for name in (*alias.shares, *alias.pins.values()):
        if name not in models:
            raise InvalidRequest(f"{where} names the model {name!r}; models: {', '.join(models)}")
    for name in alias.fallback:
        if name not in models and name not in managed:
            raise InvalidRequest(f"fallback of {where} names {name!r}, which is neither in [models] nor in [managed]")


def _named(kind: Any, name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    table = table_of(content, name)
    return {key: read_into(kind, f"[{name}.{key}]", table_of(table, key, f"{name}."), name=key) for key in table}

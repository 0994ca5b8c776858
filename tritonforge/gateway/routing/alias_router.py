"""The router of the gateway: aliases, shares between models, pins of tenants, and what is asked when a model cannot
answer. See Router; the tables are described in routing_config.py.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tritonforge.gateway.routing.attempts import Desk, Place
from tritonforge.gateway.routing.config import Alias, RoutingConfig, check_alias
from tritonforge.gateway.routing.managed import ManagedModel
from tritonforge.gateway.routing.model_info import ModelInfo
from tritonforge.gateway.routing.replicas import ReplicatedModel
from tritonforge.gateway.routing.routed import RoutedBackend, Watcher
from tritonforge.gateway.routing.router import Caller, Route, no_such_model
from tritonforge.rollout.routing import position

Models = Mapping[str, tuple[ModelInfo, Sequence[str]]]
"""What is known of each model, and the host:port of its replicas."""


class Unwatched:
    """See Watcher: nobody wants to know."""

    def tried(self, model: str, replica: str, result: str) -> None:
        """See Watcher."""

    def fell_back(self, alias: str, model: str, reason: str) -> None:
        """See Watcher."""


class AliasRouter:
    """See Router. Make it inside the event loop."""

    def __init__(
        self,
        config: RoutingConfig,
        models: Models,
        watcher: Watcher | None = None,
    ) -> None:
        """`models`: each model with its replicas.

        Raises InvalidRequest for an alias of something else, SetupError for a managed API without its key.
        """
        for alias in config.aliases.values():
            check_alias(alias, models, config.managed)
        limits = config.limits
        self.managed = {name: ManagedModel(table, limits.breaker) for name, table in config.managed.items()}
        self.models_by_name = {name: ReplicatedModel(info, urls, limits) for name, (info, urls) in models.items()}
        self.aliases = {name: Alias(name, name) for name in models} | dict(config.aliases)
        self.watcher: Watcher = watcher or Unwatched()

    def models(self) -> list[ModelInfo]:
        """See Router: models and aliases; an alias tells of the model with the largest share."""
        return [replace(self._info(alias), name=name) for name, alias in self.aliases.items()]

    def find(self, model: str, caller: Caller) -> Route:
        """See Router."""
        alias = self.aliases.get(model)
        if alias is None:
            raise no_such_model(model)
        tenant = caller.tenant.name
        caller = replace(caller, release=alias.releases.get(tenant))
        chosen = alias.pins.get(tenant) or _by_share(alias.shares, caller.request_id)
        names = list(dict.fromkeys((chosen, *alias.fallback)))
        places: list[Place] = [self.models_by_name.get(name) or self.managed[name] for name in names]
        return Route(self.models_by_name[chosen].info, RoutedBackend(places, alias, caller, self.watcher))

    def desks(self) -> Iterator[tuple[str, Desk]]:
        """Every replica and managed API, with the name of its model."""
        for name, place in (*self.models_by_name.items(), *self.managed.items()):
            for desk in place.desks:
                yield name, desk

    async def ready(self) -> bool:
        """See Router."""
        places = (*self.models_by_name.values(), *self.managed.values())
        return any(await asyncio.gather(*(place.ready() for place in places)))

    async def close(self) -> None:
        """See Router."""
        await asyncio.gather(*(place.close() for place in (*self.models_by_name.values(), *self.managed.values())))

    def _info(self, alias: Alias) -> ModelInfo:
        return self.models_by_name[max(alias.shares, key=lambda name: alias.shares[name])].info


def _by_share(shares: Mapping[str, float], request_id: str) -> str:
    """The model whose share the request falls into: always the same for one id. Another hash than a canary's."""
    place, name = position(f"share/{request_id}"), ""
    for name, share in shares.items():
        place -= share
        if place < 0 and share > 0:
            return name
    return name

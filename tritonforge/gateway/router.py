"""Which models there are and where a request to one goes: the Router protocol, and the router of one release.

The service asks it once a request. A router with replicas, aliases or fallbacks hides them behind the Backend it gives:
a Backend may try several places before its first chunk, and none after it.
"""

import time
from dataclasses import dataclass, field
from typing import Protocol

from tritonforge.gateway.backend import Backend
from tritonforge.gateway.config import Tenant
from tritonforge.gateway.errors import ApiError
from tritonforge.gateway.tokens import ReleaseTokens


@dataclass(frozen=True)
class ModelInfo:
    """What the edge knows of a model. What is None is known only with the release's folder at hand.

    `fingerprint` is the release's digest; `takes_tools`: its chat template writes tools itself.
    """

    name: str
    max_model_len: int | None = None
    fingerprint: str | None = None
    tokens: ReleaseTokens | None = None
    takes_tools: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Route:
    """Where one request goes."""

    info: ModelInfo
    backend: Backend


class Router(Protocol):
    """Finds the way to a model."""

    def models(self) -> list[ModelInfo]:
        """All models, by the names that clients use."""

    def find(self, model: str, tenant: Tenant) -> Route:
        """The way to `model`. Raises ApiError: 404 when there is no such model, 503 when none can answer."""

    async def ready(self) -> bool:
        """Whether any model can answer."""

    async def close(self) -> None:
        """Let go of all backends."""


class SingleRouter:
    """See Router: one model on one backend."""

    def __init__(self, info: ModelInfo, backend: Backend) -> None:
        self._route = Route(info, backend)

    def models(self) -> list[ModelInfo]:
        """See Router."""
        return [self._route.info]

    def find(self, model: str, tenant: Tenant) -> Route:
        """See Router."""
        if model != self._route.info.name:
            raise no_such_model(model)
        return self._route

    async def ready(self) -> bool:
        """See Router."""
        return await self._route.backend.ready()

    async def close(self) -> None:
        """See Router."""
        await self._route.backend.close()


def no_such_model(model: str) -> ApiError:
    """404, as OpenAI says it."""
    return ApiError(404, f"The model {model[:80]!r} does not exist.", "model_not_found", "model")

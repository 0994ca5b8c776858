"""Which models there are and where a request to one goes: the Router protocol, and the router of one release.

The service asks it once a request. A router with replicas, aliases or fallbacks hides them behind the Backend it gives:
a Backend may try several places before its first chunk, and none after it.
"""

from dataclasses import dataclass
from typing import Protocol

from tritonforge.gateway.api.errors import ApiError
from tritonforge.gateway.config import Tenant
from tritonforge.gateway.routing.backend import Backend
from tritonforge.gateway.routing.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and how the request is called on all its way. `traceparent` is empty, or W3C's header to hand on.

    `release` is stable or canary for a tenant that always gets that one, where a server has both.
    """

    request_id: str
    tenant: Tenant
    traceparent: str = ""
    release: str | None = None


@dataclass(frozen=True)
class Route:
    """Where one request goes."""

    info: ModelInfo
    backend: Backend


class Router(Protocol):
    """Finds the way to a model."""

    def models(self) -> list[ModelInfo]:
        """All models, by the names that clients use."""

    def find(self, model: str, caller: Caller) -> Route:
        """The way to `model`. Raises ApiError: 404 when there is no such model, 503 when none can answer."""

    async def ready(self) -> bool:
        """Whether any model can answer."""

    async def close(self) -> None:
        """Let go of all backends."""


def no_such_model(model: str) -> ApiError:
    """404, as OpenAI says it."""
    return ApiError(404, f"The model {model[:80]!r} does not exist.", "model_not_found", "model")

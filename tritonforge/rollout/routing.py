"""Decides which release answers a request while two are served: the one place where a share is taken. Pure.

`llm` is the stable release, `llm_canary` exists while another is tried beside it; both say in their configuration which
version and digest they are, and the canary which share it takes. Clients and the gateway ask `Route.target`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tritonforge.errors import InvalidRequest

STABLE_MODEL = "llm"
CANARY_MODEL = "llm_canary"
REFRESH_S = 2.0
"""How old a route may be: who routes reads it again after so long. The server waits three times as long before it
unloads what a route may still name."""
DIGEST, NAME, VERSION, SHARE = "release_digest", "release_name", "release_version", "canary_share"
"""Parameters of the two models' configurations; the last one is of the canary only."""


@dataclass(frozen=True)
class Share:
    """Which requests a canary takes: `fraction` of them, in [0, 1], and with `tenants` only of theirs."""

    fraction: float
    tenants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, int | float) or not 0 <= self.fraction <= 1:
            raise InvalidRequest(f"share must be a number in [0, 1], got {self.fraction!r}")
        if not all(isinstance(tenant, str) and tenant for tenant in self.tenants):
            raise InvalidRequest(f"tenants must be names that are not empty, got {list(self.tenants)!r}")

    def takes(self, request_id: str, tenant: str = "") -> bool:
        """Whether the request is the canary's: always the same for one id, whoever asks."""
        if self.tenants and tenant not in self.tenants:
            return False
        return position(request_id) < self.fraction

    def to_json(self) -> str:
        """The value of the parameter SHARE."""
        return json.dumps({"fraction": self.fraction, "tenants": list(self.tenants)})

    @classmethod
    def from_json(cls, text: str) -> "Share":
        """What to_json() wrote. Raises InvalidRequest for anything else."""
        try:
            value = json.loads(text)
            return cls(value["fraction"], tuple(value["tenants"]))
        except (ValueError, KeyError, TypeError):
            raise InvalidRequest(f"{SHARE} must have a fraction and tenants, got {text!r}") from None


@dataclass(frozen=True)
class Target:
    """Who answers: the ensemble to call, and the version of tokenizer and decoder behind it."""

    model: str
    version: int
    digest: str


@dataclass(frozen=True)
class Route:
    """The present route: the stable release and, while there is one, the canary with its share."""

    stable: Target
    canary: Target | None = None
    share: Share = Share(0.0)

    def target(self, request_id: str, tenant: str = "") -> Target:
        """The target of the request with this id."""
        taken = self.canary is not None and self.share.takes(request_id, tenant)
        return self.canary if taken else self.stable

    @classmethod
    def of_parameters(cls, stable: Mapping[str, str], canary: Mapping[str, str] | None = None) -> "Route":
        """The route that the configuration parameters of `llm` and, when it is loaded, of `llm_canary` tell."""
        if canary is None:
            return cls(_target(STABLE_MODEL, stable))
        return cls(_target(STABLE_MODEL, stable), _target(CANARY_MODEL, canary), Share.from_json(canary.get(SHARE, "")))


def position(request_id: str) -> float:
    """Where in [0, 1) an id lies: the first 8 bytes of its SHA-256."""
    return int.from_bytes(hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).digest()[:8]) / 2**64


def share_of(fraction: float | None, tenants: Sequence[str]) -> Share:
    """The share that was asked for: all requests of the named tenants when no fraction is given."""
    if fraction is None and not tenants:
        raise InvalidRequest("a canary needs a share, or tenants whose requests it takes")
    return Share(1.0 if fraction is None else fraction, tuple(tenants))


def _target(model: str, parameters: Mapping[str, str]) -> Target:
    try:
        return Target(model, int(parameters[VERSION]), parameters[DIGEST])
    except (KeyError, ValueError):
        raise InvalidRequest(
            f"model {model} does not tell its {VERSION} and {DIGEST}, got {dict(parameters)}"
        ) from None

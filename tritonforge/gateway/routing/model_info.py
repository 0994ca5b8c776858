"""What the edge knows of a model, and who answered a request."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the vocabulary of a release is read only where it is there
    from tritonforge.gateway.tokens import ReleaseTokens


@dataclass(frozen=True)
class ModelInfo:
    """What the edge knows of a model. What is None is known only with the release's folder at hand.

    `fingerprint` is the release's digest; `takes_tools`: its chat template writes tools itself.
    """

    name: str
    max_model_len: int | None = None
    fingerprint: str | None = None
    tokens: "ReleaseTokens | None" = None
    takes_tools: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True)
class Served:
    """Who answers a request; known from its first chunk on.

    `version` is the model version at the replica, the number of its release. `fallback` says why it was not the first
    choice that answered: unavailable, failed or timeout; empty when it was. `tries` counts that one too.
    """

    info: ModelInfo
    replica: str = ""
    version: str = ""
    fallback: str = ""
    tries: int = 1

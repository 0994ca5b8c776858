"""What one server has loaded, and what the rollout needs of it. Values and a protocol; rollout.py acts on them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tritonforge.errors import Overloaded, TritonForgeError
from tritonforge.release import Release
from tritonforge.rollout.routing import CANARY_MODEL, STABLE_MODEL, Share
from tritonforge.rollout.serving_repository import FIRST_VERSION, ServingRepository, Version

NOTHING = Share(0.0)


class Running(Protocol):
    """The running tritonserver, as the rollout needs it. Its calls raise TritonForgeErrors."""

    def load(self, model: str) -> None:
        """Load a model as the repository now says; DeadlineExceeded when it takes too long."""

    def unload(self, model: str) -> None:
        """Unload a model."""

    def generate(self, model: str) -> None:
        """Generate one token."""

    def retire(self, number: int) -> None:
        """Expect the processes of this version to end."""

    def kill(self, number: int) -> None:
        """End the processes of this version, which may hang."""

    def refuse(self, number: int) -> None:
        """Have this version refuse requests from now on, and cancel those that run."""


class Numbers:
    """Version numbers. They go down, and none is used twice by one server: Triton may still hold what had it."""

    def __init__(self) -> None:
        self._next = FIRST_VERSION

    @property
    def low(self) -> bool:
        """Whether a server that starts should count from the beginning again."""
        return self._next < FIRST_VERSION // 2

    def take(self) -> int:
        """The next one. Raises Overloaded when there is none: Triton's versions begin at 1."""
        if self._next < 1:
            raise Overloaded(f"all {FIRST_VERSION} version numbers are used; they begin anew when the server restarts")
        self._next -= 1
        return self._next + 1


@dataclass
class Served:
    """One server's repository and what is in it. `leaving` are versions that may still be loaded, but serve nobody."""

    repository: ServingRepository
    stable: Version
    canary: Version | None = None
    share: Share = NOTHING
    leaving: set[int] = field(default_factory=set)

    def rows(self, loading: Version | None) -> list[dict[str, Any]]:
        """What `release list` tells of each version."""
        canary, share = self.canary, self.share  # another thread may take it back meanwhile
        rows = [_row(self.stable, "stable", STABLE_MODEL)]
        if canary is not None:
            rows.append(_row(canary, "canary", CANARY_MODEL) | _told_share(share))
        elif loading is not None:
            rows.append(_row(loading, "loading", CANARY_MODEL) | _told_share(NOTHING))
        return rows


def told(release: Release) -> dict[str, str]:
    """What a command's answer says of a release."""
    return {"name": release.name, "digest": release.digest, "path": str(release.root)}


def take_each(*steps: Callable[[], None]) -> None:
    """Take every step, also after one that failed; then the first error is raised."""
    first = None
    for step in steps:
        try:
            step()
        except (TritonForgeError, OSError) as error:
            first = first or error
    if first is not None:
        raise first


def _row(version: Version, role: str, model: str) -> dict[str, Any]:
    return {"role": role, "model": model, "version": version.number, **told(version.release)}


def _told_share(share: Share) -> dict[str, Any]:
    return {"share": share.fraction, "tenants": list(share.tenants)}

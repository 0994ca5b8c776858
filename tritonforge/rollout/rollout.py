"""What a running server serves: one release, or a canary beside it that is promoted or taken back.

The server owns it; the control socket calls its commands, one at a time. No stream is dropped: a version is unloaded
only after new requests go elsewhere, and Triton lets go of it when its last stream has ended (seen with 2.51).
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tritonforge.errors import EngineFailure, InvalidRequest, Overloaded, TritonForgeError
from tritonforge.release import Release
from tritonforge.rollout.routing import CANARY_MODEL, REFRESH_S, SHARE, STABLE_MODEL, Share, share_of
from tritonforge.rollout.serving_repository import COMPONENTS, FIRST_VERSION, ServingRepository, Version
from tritonforge.rollout.state import RolloutState

GRACE_S = 3 * REFRESH_S
"""How long a version stays loaded when the route no longer leads to it."""


NOTHING = Share(0.0)


class Running(Protocol):
    """The running tritonserver, as the rollout needs it. Its calls raise TritonForgeErrors."""

    def load(self, model: str) -> None:
        """Load a model as the repository now says."""

    def unload(self, model: str) -> None:
        """Unload a model."""

    def generate(self, model: str) -> None:
        """Generate one token."""

    def retire(self, number: int) -> None:
        """Expect the processes of this version to end."""


@dataclass
class _Served:
    """One server's repository and what is in it."""

    repository: ServingRepository
    stable: Version
    canary: Version | None = None
    share: Share = NOTHING


class Rollout:
    """The releases of one server. `compose` is called by the thread that starts servers, the commands by others."""

    def __init__(self, state: RolloutState, running: Running, *, grace_s: float = GRACE_S) -> None:
        self._state, self._running, self._grace_s = state, running, grace_s
        self._next = FIRST_VERSION
        self._commands, self._restarting = threading.Lock(), threading.Event()
        self._served: _Served | None = None

    @property
    def release(self) -> Release:
        """The stable release."""
        return self._state.stable

    def releases(self) -> tuple[Release, ...]:
        """Those whose files are served now."""
        served = self._served
        versions = () if served is None else (served.stable, served.canary)
        return tuple(version.release for version in versions if version is not None)

    def compose(self, run_dir: Path) -> Path:
        """Make the model repository of a server that is about to start, and return it.

        It holds the stable release only, under the number it had: a server that died while a canary was tried comes
        back without it.
        """
        self._restarting.set()
        with self._commands:
            self._restarting.clear()
            release, served = self._state.reopen(), self._served
            same = served is not None and served.stable.release.digest == release.digest
            stable = served.stable if same else self._number(release)
            self._served = _Served(ServingRepository(run_dir / "model_repository", stable), stable)
            return self._served.repository.root

    def describe(self) -> dict[str, Any]:
        """What is served now, and what a rollback would bring back."""
        served, previous = self._served, self._state.previous
        rows = [] if served is None else [_row(served.stable, "stable", STABLE_MODEL)]
        if served is not None and served.canary is not None:
            share = {"share": served.share.fraction, "tenants": list(served.share.tenants)}
            rows.append(_row(served.canary, "canary", CANARY_MODEL) | share)
        return {"served": rows, "previous": None if previous is None else _told(previous)}

    def canary(self, release: Path, fraction: float | None, tenants: Sequence[str] = ()) -> dict[str, Any]:
        """Load a release beside the stable one and give it its share; with a canary running, change its share.

        A release that does not load, or generates no token, leaves everything as it was and raises why.
        """
        share, release = share_of(fraction, tenants), Release.open(release)
        with self._exclusive() as served:
            if served.canary is None:
                if release.digest == served.stable.release.digest:
                    raise InvalidRequest(f"release {release.name} is the one that is served")
                self._bring_up(served, release, share)
            elif release.digest != served.canary.release.digest:
                raise InvalidRequest(f"{served.canary.release.name} is the canary; promote it or take it back first")
            else:
                self._set_share(served, share)
        return self.describe()

    def promote(self) -> dict[str, Any]:
        """Make the canary the stable release; the old one ends with its last stream."""
        with self._exclusive() as served:
            if served.canary is None:
                raise InvalidRequest("there is no canary to promote")
            self._promote(served)
        return self.describe()

    def rollback(self) -> dict[str, Any]:
        """Take the canary back; without one, bring back the release that was stable before the last promotion."""
        with self._exclusive() as served:
            if served.canary is not None:
                self._take_back(served)
            elif self._state.previous is None:
                raise InvalidRequest("there is neither a canary to take back nor an earlier release to return to")
            else:
                self._bring_up(served, self._state.previous, NOTHING)
                self._promote(served)
                self._state.forget_previous()
        return self.describe()

    def _bring_up(self, served: _Served, release: Release, share: Share) -> None:
        """Load `release` beside the stable version and prove that it generates."""
        repository = served.repository
        repository.check(release)
        version = self._number(release)
        try:
            repository.add(version)
            repository.serve(served.stable, version)
            self._load(*COMPONENTS)
            repository.point(CANARY_MODEL, version, {SHARE: NOTHING.to_json()})
            self._load(CANARY_MODEL)
            self._running.generate(CANARY_MODEL)
            served.canary = version
            self._set_share(served, share)
        except (TritonForgeError, OSError):
            served.canary, served.share = None, NOTHING
            with contextlib.suppress(Overloaded):  # the server has died, and its repository with it
                self._remove_canary(served, version)
            raise

    def _promote(self, served: _Served) -> None:
        old, new = served.stable, served.canary
        try:
            served.repository.point(STABLE_MODEL, new)
            self._load(STABLE_MODEL)
            self._state.promote(new.release)
        except TritonForgeError:
            served.repository.point(STABLE_MODEL, old)
            with contextlib.suppress(Overloaded):  # the server has died, and its repository with it
                self._load(STABLE_MODEL)
            raise
        served.stable = new
        self._set_share(served, NOTHING)
        served.canary = None
        self._await_routes()
        self._drop_canary_model(served)
        self._retire(served, old)

    def _take_back(self, served: _Served) -> None:
        self._set_share(served, NOTHING)
        version, served.canary = served.canary, None
        self._await_routes()
        self._remove_canary(served, version)

    def _remove_canary(self, served: _Served, version: Version) -> None:
        self._drop_canary_model(served)
        self._retire(served, version)

    def _drop_canary_model(self, served: _Served) -> None:
        if (served.repository.root / CANARY_MODEL).exists():
            self._running.unload(CANARY_MODEL)
            served.repository.drop(CANARY_MODEL)

    def _retire(self, served: _Served, version: Version) -> None:
        """Serve the stable version only. Streams of the other go on; nothing new reaches it."""
        self._running.retire(version.number)
        served.repository.serve(served.stable)
        self._load(*COMPONENTS)

    def _set_share(self, served: _Served, share: Share) -> None:
        served.repository.point(CANARY_MODEL, served.canary, {SHARE: share.to_json()})
        self._load(CANARY_MODEL)
        served.share = share

    def _load(self, *models: str) -> None:
        for model in models:
            self._running.load(model)

    def _await_routes(self) -> None:
        """Wait until nobody who routes can still hold the route of before."""
        if self._restarting.wait(self._grace_s):
            raise EngineFailure("the server died meanwhile; it comes back with its stable release")

    def _number(self, release: Release) -> Version:
        self._next -= 1
        return Version(self._next + 1, release)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[_Served]:
        """Inside, one command owns what is served. Raises Overloaded while another one is under way."""
        if not self._commands.acquire(blocking=False):
            raise Overloaded("another release command is under way, or the server is being started")
        try:
            if self._served is None:
                raise Overloaded("the server is not started yet")
            yield self._served
        finally:
            self._commands.release()


def _told(release: Release) -> dict[str, str]:
    return {"name": release.name, "digest": release.digest, "path": str(release.root)}


def _row(version: Version, role: str, model: str) -> dict[str, Any]:
    return {"role": role, "model": model, "version": version.number, **_told(version.release)}

"""The steps by which releases come and go on one server: bring up, switch, take back. Rollout decides which, and when.

Each leaves the stable release serving, whatever fails. One thread at a time takes steps; `give_up_loading` is called by
others.
"""

import logging
import threading
from collections.abc import Callable

from tritonforge.errors import Cancelled, DeadlineExceeded, EngineFailure, TritonForgeError
from tritonforge.rollout.routing import CANARY_MODEL, SHARE, STABLE_MODEL, Share
from tritonforge.rollout.served import NOTHING, Running, Served, take_each
from tritonforge.rollout.serving_repository import COMPONENTS, Version
from tritonforge.rollout.state import RolloutState

log = logging.getLogger("tritonforge.server")


class RolloutSteps:
    """`await_routes` waits until nobody who routes can hold the route of before; it raises when the server dies."""

    def __init__(self, state: RolloutState, running: Running, await_routes: Callable[[], None]) -> None:
        self._state, self._running, self._await_routes = state, running, await_routes
        self._unwanted = threading.Event()
        self.loading: Version | None = None

    def give_up_loading(self) -> bool:
        """End the load of a canary, so that its command fails soon; False when none is being loaded."""
        loading = self.loading
        if loading is not None:
            self._unwanted.set()
            self._running.kill(loading.number)
        return loading is not None

    def bring_up(self, served: Served, version: Version, share: Share) -> None:
        """Load a version beside the stable one, prove that it generates, and give it its share."""
        repository = served.repository
        self._unwanted.clear()
        self.loading = version
        try:
            self._expect_ends(served)
            repository.add(version)
            repository.serve(served.stable, version)
            self._load_new(version, *COMPONENTS)
            repository.point(CANARY_MODEL, version, {SHARE: NOTHING.to_json()})
            self._load_new(version, CANARY_MODEL)
            self._running.generate(CANARY_MODEL)
            self._check_wanted(version)
            served.canary = version
            self.set_share(served, version, share)
        except (TritonForgeError, OSError):
            self.clean_up(served, version)
            raise
        finally:
            self.loading = None

    def _load_new(self, version: Version, *models: str) -> None:
        """Load what may hang: what takes too long is ended, or it would hold up every later command."""
        for model in models:
            self._check_wanted(version)
            try:
                self._running.load(model)
            except DeadlineExceeded:
                self._running.kill(version.number)
                raise
            except EngineFailure:
                self._check_wanted(version)
                raise

    def _check_wanted(self, version: Version) -> None:
        if self._unwanted.is_set():
            raise Cancelled(f"the load of {version.release.name} was given up: a rollback was asked for")

    def switch(self, served: Served) -> tuple[Version, Version]:
        """Make the canary stable, or leave all as it was; returns the version before it, and it."""
        old, new = served.stable, served.canary
        try:
            served.repository.point(STABLE_MODEL, new)
            self._running.load(STABLE_MODEL)
            self._state.promote(new.release)
        except (TritonForgeError, OSError):
            try:
                served.repository.point(STABLE_MODEL, old)
                self._running.load(STABLE_MODEL)
            except (TritonForgeError, OSError) as error:  # the server has died, and its repository with it
                log.warning("the route does not lead back to %s: %s", old.release.name, error)
            raise
        served.stable, served.canary, served.share = new, None, NOTHING
        return old, new

    def let_go(self, served: Served, old: Version, new: Version) -> None:
        """Unload the version that was stable, when nobody's route leads to it any more."""
        served.leaving.add(old.number)
        try:
            take_each(
                lambda: self.set_share(served, new, NOTHING),
                self._await_routes,
                lambda: self._drop_canary_model(served),
                lambda: self._serve_stable_only(served),
            )
        except (TritonForgeError, OSError) as error:
            text = f"{new.release.name} is stable now, but {old.release.name} may still be loaded: {error}"
            raise EngineFailure(text) from error

    def take_back(self, served: Served) -> None:
        """Unload the canary, when nobody's route leads to it any more."""
        version = served.canary
        self.set_share(served, version, NOTHING)
        served.canary = None
        served.leaving.add(version.number)
        self._await_routes()
        take_each(lambda: self._drop_canary_model(served), lambda: self._serve_stable_only(served))

    def clean_up(self, served: Served, version: Version) -> None:
        """Remove what was loaded of a version that does not come; what fails is left to the next command."""
        served.canary, served.share = None, NOTHING
        served.leaving.add(version.number)
        try:
            take_each(lambda: self._drop_canary_model(served), lambda: self._serve_stable_only(served))
        except (TritonForgeError, OSError) as error:
            log.warning("of %s something may still be loaded: %s", version.release.name, error)

    def _drop_canary_model(self, served: Served) -> None:
        if (served.repository.root / CANARY_MODEL).exists():
            self._running.unload(CANARY_MODEL)
            served.repository.drop(CANARY_MODEL)

    def _serve_stable_only(self, served: Served) -> None:
        """Streams of the versions that leave go on; nothing new reaches them."""
        self._expect_ends(served)
        served.repository.serve(served.stable)
        for model in COMPONENTS:
            self._running.load(model)
        served.leaving.clear()

    def _expect_ends(self, served: Served) -> None:
        for number in served.leaving:
            self._running.retire(number)

    def set_share(self, served: Served, version: Version, share: Share) -> None:
        """Tell those who route which share this version takes."""
        served.repository.point(CANARY_MODEL, version, {SHARE: share.to_json()})
        self._running.load(CANARY_MODEL)
        served.share = share

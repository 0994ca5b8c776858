"""What a running server serves: one release, or a canary beside it that is promoted or taken back.

The server owns it; the control socket calls its commands, one at a time. No stream is dropped: a version is unloaded
only after new requests go elsewhere, and Triton lets go of it when its last stream has ended (seen with 2.51).
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tritonforge.errors import EngineFailure, InvalidRequest, Overloaded, TritonForgeError
from tritonforge.launch.drain import count_taken_back
from tritonforge.release import Release
from tritonforge.rollout.routing import REFRESH_S, Share, share_of
from tritonforge.rollout.served import NOTHING, Numbers, Running, Served, take_each, told
from tritonforge.rollout.serving_repository import ServingRepository, Version
from tritonforge.rollout.state import RolloutState
from tritonforge.rollout.steps import RolloutSteps

GRACE_S = 3 * REFRESH_S
"""How long a version stays loaded when the route no longer leads to it."""

log = logging.getLogger("tritonforge.server")


class Rollout:
    """The releases of one server. `compose` and `give_up` are called by the thread that watches it, the rest by others.

    `check_room` raises when there is too little memory for one more release.
    """

    def __init__(
        self,
        state: RolloutState,
        running: Running,
        *,
        grace_s: float = GRACE_S,
        check_room: Callable[[Release], None] = lambda release: None,
    ) -> None:
        self._state, self._running, self._grace_s, self._check_room = state, running, grace_s, check_room
        self._steps = RolloutSteps(state, running, self._await_routes)
        self._numbers = Numbers()
        self._commands, self._restarting = threading.Lock(), threading.Event()
        self._served: Served | None = None
        self._giving_up: dict[int, threading.Thread] = {}
        self._taken_back = 0

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
            if served is not None and served.canary is not None:
                log.warning("the canary %s is gone with the server", served.canary.release.name)
            same = served is not None and served.stable.release.digest == release.digest
            if self._numbers.low:
                self._numbers, same = Numbers(), False
            stable = served.stable if same else Version(self._numbers.take(), release)
            self._served = Served(ServingRepository(run_dir / "model_repository", stable), stable)
            count_taken_back(run_dir, self._taken_back)
            return self._served.repository.root

    def describe(self) -> dict[str, Any]:
        """What is served now, what is being loaded, and what a rollback would bring back."""
        served, previous = self._served, self._state.previous
        rows = [] if served is None else served.rows(self._steps.loading)
        return {"served": rows, "previous": None if previous is None else told(previous)}

    def canary(
        self, release: Path, fraction: float | None, tenants: Sequence[str] = (), *, ignore_memory: bool = False
    ) -> dict[str, Any]:
        """Load a release beside the stable one and give it its share; with a canary running, change its share.

        A release that does not load, or generates no token, leaves everything as it was and raises why.
        """
        share, release = share_of(fraction, tenants), Release.open(release)
        with self._exclusive() as served:
            if served.canary is None:
                if release.digest == served.stable.release.digest:
                    raise InvalidRequest(f"release {release.name} is the one that is served")
                self._bring_up(served, release, share, ignore_memory=ignore_memory)
            elif release.digest != served.canary.release.digest:
                raise InvalidRequest(f"{served.canary.release.name} is the canary; promote it or take it back first")
            else:
                self._steps.set_share(served, served.canary, share)
        return self.describe()

    def promote(self) -> dict[str, Any]:
        """Make the canary the stable release; the old one ends with its last stream."""
        with self._exclusive() as served:
            if served.canary is None:
                raise InvalidRequest("there is no canary to promote")
            self._steps.let_go(served, *self._steps.switch(served))
        return self.describe()

    def rollback(self, *, ignore_memory: bool = False) -> dict[str, Any]:
        """Take the canary back, also one that is being loaded; without one, bring back the release that was stable
        before the last promotion."""
        given_up = self._steps.give_up_loading()
        with self._exclusive(wait=given_up) as served:
            if served.canary is not None:
                self._steps.take_back(served)
            elif not given_up:
                self._return(served, ignore_memory=ignore_memory)
        return self.describe()

    def give_up(self, release: Release, why: str) -> bool:
        """Begin to take the canary back whose files have changed; its requests are refused at once.

        False when `release` is the stable one, or this has failed: then only another server helps. Does not wait.
        """
        served = self._served
        if served is None or _is_of(served.stable, release):
            return False
        canary = served.canary
        if not _is_of(canary, release):
            return True  # it is gone
        if canary.number not in self._giving_up:
            log.error("the canary %s (version %d) is taken back: %s", release.name, canary.number, why)
            thread = threading.Thread(target=self._give_up, args=(canary,), name="canary-gives-up", daemon=True)
            self._giving_up = {canary.number: thread}
            thread.start()
            return True
        return self._giving_up[canary.number].is_alive() or served.canary is None

    def _give_up(self, canary: Version) -> None:
        try:
            with self._exclusive(wait=True) as served:
                if served.canary is canary:
                    self._taken_back += 1
                    count_taken_back(served.repository.root.parent, self._taken_back)
                    take_each(lambda: self._running.refuse(canary.number), lambda: self._steps.take_back(served))
        except (TritonForgeError, OSError) as error:
            log.error("the canary could not be taken back: %s", error)

    def _return(self, served: Served, *, ignore_memory: bool) -> None:
        """Bring back the release that was stable before the last promotion."""
        if self._state.previous is None:
            raise InvalidRequest("there is neither a canary to take back nor an earlier release to return to")
        self._bring_up(served, self._state.previous, NOTHING, ignore_memory=ignore_memory)
        try:
            old, new = self._steps.switch(served)
        except (TritonForgeError, OSError):
            self._steps.clean_up(served, served.canary)
            raise
        take_each(self._state.forget_previous, lambda: self._steps.let_go(served, old, new))

    def _bring_up(self, served: Served, release: Release, share: Share, *, ignore_memory: bool) -> None:
        served.repository.check(release)
        if not ignore_memory:
            self._check_room(release)
        self._steps.bring_up(served, Version(self._numbers.take(), release), share)

    def _await_routes(self) -> None:
        """Wait until nobody who routes can still hold the route of before."""
        if self._restarting.wait(self._grace_s):
            raise EngineFailure("the server died meanwhile; it comes back with its stable release")

    @contextlib.contextmanager
    def _exclusive(self, *, wait: bool = False) -> Iterator[Served]:
        """Inside, one command owns what is served. Without `wait`, Overloaded while another one is under way."""
        if not self._commands.acquire(blocking=wait):
            raise Overloaded("another release command is under way, or the server is being started")
        try:
            if self._served is None:
                raise Overloaded("the server is not started yet")
            yield self._served
        finally:
            self._commands.release()


def _is_of(version: Version | None, release: Release) -> bool:
    """Whether `version` serves this release from this folder."""
    return version is not None and (version.release.root, version.release.digest) == (release.root, release.digest)

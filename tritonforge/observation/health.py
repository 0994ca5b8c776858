"""Whether the decoder can take a request now, and if not, why; and the watchdog on the progress of its steps.

A thread looks four times a second. Triton's own readiness knows nothing of this: the metrics carry it, and `tritonforge
probe` reads them. The supervisor is told, by a file, of a step that takes so long that only a new process can help.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tritonforge.launch.drain import VARIABLE as DRAIN_VARIABLE
from tritonforge.observation.observation import Observation

if TYPE_CHECKING:
    from tritonforge.loop import EngineLoop

LOOK_S = 0.25
STALLED_S = 3.0
"""A step that takes longer makes the service not ready; it is again when the step ends after all."""
SETTLE_S = 1.0
"""The queue counts as full until nobody was refused for so long."""
REASONS = ("queue_full", "stalled", "draining", "failed")

log = logging.getLogger(__name__)


class Health:
    """Looks at the loop; `reasons` says why it is not ready, in words, and is empty while it is.

    A step that takes `stall_timeout_s` is not waited for any longer: `on_hung` is told, by default the supervisor,
    which replaces the server.
    """

    def __init__(
        self,
        loop: "EngineLoop",
        on_hung: Callable[[str], None] | None = None,
        *,
        stall_timeout_s: float | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.reasons: dict[str, str] = {}
        self.started_s = time.time()
        self.seen_s = int(self.started_s)
        self._loop, self._clock_ns = loop, clock_ns
        self._on_hung = on_hung or tell_supervisor
        self._hung_ns = int((stall_timeout_s or Observation().stall_timeout_s) * 1e9)
        self._told_hung = False
        self._not_ready_since_ns: int | None = None
        self._refused, self._refused_ns = 0, -int(SETTLE_S * 1e9)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    @property
    def last_token_s(self) -> int:
        """When a step last brought a token, as a whole second of Unix time; 0: never."""
        last_ns = self._loop.meter.last_token_ns
        return 0 if last_ns is None else int(time.time() - (self._clock_ns() - last_ns) / 1e9)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self.look()
            except Exception:
                log.exception("the watchdog failed")

    def look(self) -> None:
        """Find out what is wrong now, and log what has changed."""
        self.seen_s = int(time.time())
        now = self._clock_ns()
        found = self._find(now)
        for reason in found.keys() - self.reasons.keys():
            log.warning("not ready: %s: %s", reason, found[reason])
        if self.reasons and not found:
            log.warning("ready again after %.1f s: %s", (now - self._not_ready_since_ns) / 1e9, ", ".join(self.reasons))
        if found and not self.reasons:
            self._not_ready_since_ns = now
        self.reasons = found

    def _find(self, now_ns: int) -> dict[str, str]:
        checks = (self._stalled(now_ns), self._queue_full(now_ns), self._refusal())
        return {reason: text for reason, text in filter(None, checks)}

    def _stalled(self, now_ns: int) -> tuple[str, str] | None:
        since_ns = self._loop.meter.busy_since_ns
        took_ns = 0 if since_ns is None else now_ns - since_ns
        if took_ns < STALLED_S * 1e9:
            self._told_hung = False
            return None
        scheduler = self._loop.scheduler
        cause = (
            f"a step has taken {took_ns / 1e9:.1f} s, with {scheduler.num_running} requests running and "
            f"{scheduler.num_waiting} waiting"
        )
        if took_ns >= self._hung_ns and not self._told_hung:
            log.critical("the engine hangs: %s", cause)
            self._tell_hung(cause)
        return "stalled", cause

    def _tell_hung(self, cause: str) -> None:
        """Until it was told: with a full disk it takes several tries."""
        try:
            self._on_hung(cause)
        except OSError as error:
            log.error("the supervisor cannot be told: %s", error)
        else:
            self._told_hung = True

    def _queue_full(self, now_ns: int) -> tuple[str, str] | None:
        scheduler = self._loop.scheduler
        refused = scheduler.num_refused["queue full"] + scheduler.num_refused["pushed out"]
        if refused != self._refused:
            self._refused, self._refused_ns = refused, now_ns
        if scheduler.waiting.usage < 1 and now_ns - self._refused_ns >= SETTLE_S * 1e9:
            return None
        return "queue_full", f"{scheduler.num_waiting} requests wait; {refused} were refused for want of room so far"

    def _refusal(self) -> tuple[str, str] | None:
        refusal = self._loop.refusal
        if refusal is None:
            return None
        return ("failed" if self._loop.failed else "draining"), refusal


def stall_file(drain_file: Path) -> Path:
    """Where a decoder tells the supervisor that it hangs."""
    return drain_file.with_name("hung")


def tell_supervisor(cause: str) -> None:
    """Have this process replaced, where a supervisor started the server."""
    if DRAIN_VARIABLE in os.environ:
        path = stall_file(Path(os.environ[DRAIN_VARIABLE]))
        partial = path.with_suffix(".partial")
        partial.write_text(cause, encoding="utf-8")
        partial.rename(path)

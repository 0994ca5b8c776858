"""One request's way out of the decoder, and the threads that serve it. It knows no Triton type but through a Sender.

The loop hands a ResponseStream its deltas; the Emitter's thread merges what is pending and sends it, so a slow send
never delays a step; the CancelPoller's thread asks whether the client has left. Every stream is closed exactly once.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tritonforge.errors import EngineFailure, TritonForgeError
from tritonforge.generation import Delta, Generation, Outbox

log = logging.getLogger(__name__)

CANCEL_POLL_S = 0.005
"""Pause between two questions to Triton, each about one stream: a question costs about as much as sending a token, so
their rate is bounded, whatever the number of streams."""

JOIN_S = 1.0
"""A call into Triton never returns once the server process is dead, so nobody waits long for its thread."""

FLUSH_S = 30.0
"""How long stop() waits for what is pending to be sent."""


class Sender(Protocol):
    """The sending end of one request. After finish, fail or end it must not be touched again."""

    def send(self, deltas: list[Delta]) -> None: ...

    def finish(self, deltas: list[Delta], statistics: dict[str, int]) -> None: ...

    def fail(self, error: Exception) -> None: ...

    def end(self) -> None:
        """Close without a response: the last resort."""

    def is_cancelled(self) -> bool: ...


class ResponseStream:
    """Collects the deltas of one request until they are sent; with stream=false all are sent as one response."""

    def __init__(self, sender: Sender, emitter: "Emitter", cancel: Callable[[int], None]) -> None:
        self.key: int | None = None
        self._sender: Sender | None = sender
        self._lock = threading.Lock()  # guards _sender: none may touch it while, or after, it is closed
        self._emitter = emitter
        self._cancel = cancel
        self._outbox = Outbox()
        self._generation: Generation | None = None

    @property
    def closed(self) -> bool:
        """Whether the final response was sent."""
        return self._sender is None

    def take(self, generation: Generation, delta: Delta) -> None:
        """The loop's sink; never blocks on Triton."""
        self._generation = generation
        self._outbox.put(delta)
        if generation.asked.stream or delta.final:
            self._emitter.post(self.send_pending)

    def send_pending(self) -> None:
        """Send what has gathered as one response."""
        deltas = self._outbox.take_all()
        if not deltas or self.closed:
            return  # sent together with an earlier one, or the stream has failed
        now = time.monotonic_ns()
        timeline = self._generation.timeline
        timeline.first_emit_ns = timeline.first_emit_ns or now
        last = deltas[-1]
        if last.error is not None:
            self.fail(last.error)
        elif last.final:
            self.finish(deltas, self._generation.statistics(now))
        else:
            self._send(deltas)

    def _send(self, deltas: list[Delta]) -> None:
        """Send and go on; an answer with a hole in it is worse than none, so a failure ends the request."""
        try:
            self._sender.send(deltas)
        except Exception:
            log.exception("a response of request %s could not be sent", self.key)
            self._cancel(self.key)
            self._close(_send_failed)

    def fail(self, error: Exception) -> None:
        """End with `error`."""
        self._close(lambda sender: sender.fail(error))

    def finish(self, deltas: list[Delta], statistics: dict[str, int]) -> None:
        """End with `deltas` as the last response."""
        self._close(lambda sender: sender.finish(deltas, statistics), _send_failed)

    def _close(self, *attempts: Callable[[Sender], None]) -> None:
        """Close by the first of `attempts` that succeeds, else without a response. Idempotent."""
        with self._lock:
            sender, self._sender = self._sender, None
            if sender is None:
                return
            for attempt in (*attempts, lambda sender: sender.end()):
                try:
                    attempt(sender)
                    return
                except Exception:
                    log.exception("the final response of request %s could not be sent", self.key)

    def is_cancelled(self) -> bool:
        """Whether the client cancelled or left; False once the final response was sent."""
        with self._lock:
            return self._sender is not None and self._sender.is_cancelled()


def _send_failed(sender: Sender) -> None:
    sender.fail(EngineFailure("a response could not be sent; see the server's log"))


class Emitter:
    """One thread that runs what is posted, in order. After stop() the poster's own thread runs it: nothing is lost."""

    def __init__(self) -> None:
        self._actions: deque[Callable[[], None]] = deque()
        self._posted = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="emitter", daemon=True)
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` soon; it must not raise."""
        with self._posted:
            if not self._stopped:
                self._actions.append(action)
                self._posted.notify()
                return
        action()

    def stop(self, timeout_s: float = FLUSH_S) -> None:
        """Run what was posted, for up to `timeout_s`, and end the thread."""
        with self._posted:
            self._stopped = True
            self._posted.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._posted:
                self._posted.wait_for(lambda: self._actions or self._stopped)
                if not self._actions:
                    return
                action = self._actions.popleft()
            try:
                action()
            except Exception:
                log.exception("an emitter action failed")


class CancelPoller:
    """One thread that asks, for one open stream after the other, whether its client left; then it calls `cancel`."""

    def __init__(self, cancel: Callable[[int], None]) -> None:
        self._cancel = cancel
        self._open: deque[ResponseStream] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cancel-poller", daemon=True)
        self._thread.start()

    def watch(self, stream: ResponseStream) -> None:
        """Ask for `stream` until it is closed."""
        self._open.append(stream)

    def stop(self) -> None:
        """End the thread; it is not waited for longer than JOIN_S."""
        self._stop.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stop.wait(CANCEL_POLL_S):
            while self._open and self._open[0].closed:
                self._open.popleft()
            if self._open:
                self._ask(self._open[0])
                self._open.rotate(-1)

    def _ask(self, stream: ResponseStream) -> None:
        try:
            if stream.is_cancelled():
                self._cancel(stream.key)
        except Exception:
            log.exception("Triton did not say whether request %s is cancelled", stream.key)


def typed(error: Exception) -> TritonForgeError:
    """`error`, or, when it is no typed one, what a client may know of it; the rest is logged."""
    if isinstance(error, TritonForgeError):
        return error
    log.error("unexpected error", exc_info=error)
    return EngineFailure(f"unexpected {type(error).__name__}; see the server's log")

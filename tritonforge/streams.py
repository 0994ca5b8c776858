"""One request's way out of the decoder, and the threads that serve it. It knows no Triton type but through a Sender.

The loop hands a ResponseStream its deltas; the Emitter's thread merges what is pending and sends it; the CancelPoller's
thread asks whether the client has left. Every stream is closed exactly once.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from tritonforge.emitter import Emitter
from tritonforge.errors import Cancelled, EngineFailure, TritonForgeError
from tritonforge.generation import Delta, Generation, Outbox
from tritonforge.observation.recorder import Recorder
from tritonforge.observation.request_record import ERROR, RequestRecord
from tritonforge.responses import Tensors, response_tensors

log = logging.getLogger(__name__)

CANCEL_POLL_S = 0.005
"""Pause between two questions to Triton, each about one stream: a question costs about as much as sending a token, so
their rate is bounded, whatever the number of streams."""

NOT_SENT = "a response could not be sent; see the server's log"

JOIN_S = 1.0
"""A call into Triton never returns once the server process is dead, so nobody waits long for its thread."""


class Sender(Protocol):
    """The sending end of one request. After a final send, fail or end it must not be touched again."""

    request_id: str

    def send(self, tensors: Tensors, *, final: bool) -> None: ...

    def fail(self, error: Exception) -> None: ...

    def end(self) -> None:
        """Close without a response: the last resort."""

    def is_cancelled(self) -> bool: ...


class ResponseStream:
    """Collects the deltas of one request until they are sent; with stream=false all are sent as one response."""

    def __init__(
        self,
        sender: Sender,
        emitter: Emitter,
        cancel: Callable[[int], None],
        under_load: Callable[[], bool],
        recorder: Recorder | None = None,
        loaded_interval_ms: int = 100,
    ) -> None:
        """`loaded_interval_ms` is the least time between two responses under load, unless the request says otherwise.

        A response costs about 0.4 ms of processor time on its way from here into a client's hands, as much for four
        tokens as for one.
        """
        self.key: int | None = None
        self._sender: Sender | None = sender
        self._lock = threading.Lock()  # guards _sender: none may touch it while, or after, it is closed
        self._emitter = emitter
        self._cancel = cancel
        self._under_load, self._loaded_interval_ms = under_load, loaded_interval_ms
        self._recorder = recorder or Recorder()
        self._outbox = Outbox()
        self._generation: Generation | None = None
        self._request_id = sender.request_id
        self._texts: list[str] = []
        self._sent_ns: int | None = None
        self._longest_gap_us: float | None = None
        self._send_posted = False

    @property
    def closed(self) -> bool:
        """Whether the final response was sent."""
        return self._sender is None

    def take(self, generation: Generation, delta: Delta) -> None:
        """The loop's sink; never blocks on Triton."""
        self._generation = generation
        self._outbox.put(delta)
        if delta.final:
            self._emitter.post(self.send_pending)
        elif generation.asked.stream and not self._send_posted:
            self._send_posted = True
            self._emitter.post(self.send_pending, self._due_ns(generation.asked.stream_interval_ms))

    def _due_ns(self, interval_ms: int | None) -> int:
        """When the next response may be sent: the first at once, then one each interval."""
        if interval_ms is None:
            interval_ms = self._loaded_interval_ms if self._under_load() else 0
        return 0 if self._sent_ns is None else self._sent_ns + interval_ms * 1_000_000

    def send_pending(self) -> None:
        """Send what has gathered as one response."""
        self._send_posted = False  # before taking: what comes from now on posts again
        deltas = self._outbox.take_all()
        if not deltas or self.closed:
            return  # sent together with an earlier one, or the stream has failed
        now = time.monotonic_ns()
        if self._sent_ns is not None:
            self._longest_gap_us = max(self._longest_gap_us or 0.0, (now - self._sent_ns) / 1000)
        self._sent_ns = now
        timeline = self._generation.timeline
        timeline.first_emit_ns = timeline.first_emit_ns or now
        if self._recorder.keeps_text:
            self._texts += [delta.text for delta in deltas]
        last = deltas[-1]
        if last.error is not None:
            self.fail(last.error)
        elif last.final:
            statistics = self._generation.statistics(now)
            self._record(str(last.finish_reason), now, statistics=statistics)
            self.finish(response_tensors(self._generation.asked, deltas, statistics))
        else:
            self._send(response_tensors(self._generation.asked, deltas))

    def _send(self, tensors: Tensors) -> None:
        """Send and go on; an answer with a hole in it is worse than none, so a failure ends the request."""
        try:
            self._sender.send(tensors, final=False)
        except Exception:
            log.exception("a response of request %s could not be sent", self.key)
            self._cancel(self.key)
            self._record(ERROR, time.monotonic_ns(), error=EngineFailure(NOT_SENT))
            self._close(_send_failed)

    def fail(self, error: Exception) -> None:
        """End with `error`."""
        error = typed(error)
        if not self.closed:
            self._record("cancelled" if error.code == Cancelled.code else ERROR, time.monotonic_ns(), error=error)
        self._close(lambda sender: sender.fail(error))

    def _record(self, outcome: str, now_ns: int, **more: Any) -> None:
        """Take down how the request ended."""
        generation = self._generation
        known = {} if generation is None else {"asked": generation.asked, "timeline": generation.timeline}
        gap, text = self._longest_gap_us, "".join(self._texts)
        self._recorder.record(
            RequestRecord(outcome, now_ns, self._request_id, longest_gap_us=gap, text=text, **known, **more)
        )

    def finish(self, tensors: Tensors) -> None:
        """End with `tensors` as the last response."""
        self._close(lambda sender: sender.send(tensors, final=True), _send_failed)

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
    sender.fail(EngineFailure(NOT_SENT))


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

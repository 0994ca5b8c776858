"""The only file that knows pb_utils: Triton requests in, Triton responses out, for the model.py files.

A ResponseStream is one request's way out. The loop hands it deltas; the Emitter's thread merges what is pending and
sends it, so that a slow send never delays a step; the CancelPoller's thread asks Triton whether the client has left.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tritonforge.contract import FINISH_REASON, STATISTICS, TEXT_OUTPUT, TOKEN_IDS
from tritonforge.errors import STATUS, EngineFailure, InvalidRequest, TritonForgeError
from tritonforge.generation import Delta, Generation
from tritonforge.loop import EngineLoop
from tritonforge.metrics import FAMILIES, MetricFamily

log = logging.getLogger(__name__)

CANCEL_POLL_S = 0.005
"""Pause between two questions to Triton, each about one stream: a question costs about as much as sending a token, so
their rate is bounded, whatever the number of streams."""

REPORT_S = 0.1
"""Pause between two updates of the metrics."""

JOIN_S = 1.0
"""A call into Triton never returns once the server process is dead, so nobody waits for the thread that makes it."""

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def read_options(request: Any) -> dict[str, Any]:
    """The request's parameters, as Triton passed them on."""
    return json.loads(request.parameters())


def read_tensor(request: Any, name: str) -> np.ndarray | None:
    """The input tensor `name`, or None when an optional one was left out."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def read_text(request: Any, name: str) -> str:
    """The one UTF-8 string of input `name`. Raises InvalidRequest naming the byte that is none."""
    raw = read_tensor(request, name).reshape(-1)[0]
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{name} must be UTF-8, got byte 0x{raw[error.start]:02x} at position {error.start}"
        ) from None


def response(**tensors: np.ndarray) -> Any:
    """An InferenceResponse with `tensors`, each with a leading batch dimension of 1."""
    return pb_utils.InferenceResponse(
        output_tensors=[pb_utils.Tensor(name, np.expand_dims(value, 0)) for name, value in tensors.items()]
    )


def error_response(error: Exception) -> Any:
    """An InferenceResponse for `error`; what is no typed error is logged and told without its traceback."""
    if not isinstance(error, TritonForgeError):
        log.error("unexpected error", exc_info=error)
        error = EngineFailure(f"unexpected {type(error).__name__}; see the server's log")
    code = getattr(pb_utils.TritonError, STATUS[error.code].triton)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))


def load_error(error: TritonForgeError) -> Exception:
    """The exception with which initialize() makes Triton refuse the model and tell why."""
    return pb_utils.TritonModelException(str(error))


class ResponseStream:
    """Collects the deltas of one request until they are sent; with stream=false all are sent as one response."""

    def __init__(self, sender: Any, emitter: "Emitter") -> None:
        self.key: int | None = None
        self._sender = sender
        self._emitter = emitter
        self._lock = threading.Lock()  # guards _sender: it must not be touched after its final response
        self._pending: list[Delta] = []
        self._generation: Generation | None = None

    def take(self, generation: Generation, delta: Delta) -> None:
        """The loop's sink; never blocks on Triton."""
        self._generation = generation
        self._pending.append(delta)
        if generation.asked.stream or delta.final:
            self._emitter.notify(self)

    def send_pending(self) -> None:
        """Send what has gathered as one response; called by the emitter's thread only."""
        deltas, self._pending = self._pending, []
        if not deltas:
            return  # sent together with an earlier notification
        now = time.monotonic_ns()
        timeline = self._generation.timeline
        timeline.first_emit_ns = timeline.first_emit_ns or now
        if deltas[-1].final:
            self.close(self._last_response(deltas, now))
        else:
            self._sender.send(response(**_tensors(deltas)))

    def _last_response(self, deltas: list[Delta], now_ns: int) -> Any:
        last = deltas[-1]
        if last.error is not None:
            return error_response(last.error)
        statistics = self._generation.statistics(now_ns)
        return response(
            **_tensors(deltas),
            **{FINISH_REASON.name: np.array([last.finish_reason.encode()], object)},
            **{tensor.name: np.array([statistics[tensor.name]], np.int64) for tensor in STATISTICS},
        )

    def close(self, last: Any) -> None:
        """Send the final response; the sender is not used after it."""
        with self._lock:
            sender, self._sender = self._sender, None
            sender.send(last, flags=FINAL)

    def is_cancelled(self) -> bool:
        """Whether the client cancelled or left; False once the final response was sent."""
        with self._lock:
            return self._sender is not None and self._sender.is_cancelled()

    @property
    def closed(self) -> bool:
        """Whether the final response was sent."""
        return self._sender is None


def _tensors(deltas: list[Delta]) -> dict[str, np.ndarray]:
    text = "".join(delta.text for delta in deltas)
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return {
        TEXT_OUTPUT.name: np.array([text.encode()], object),
        TOKEN_IDS.name: np.array(token_ids, np.int32),
    }


class Emitter:
    """One thread that sends what streams have pending, in the order in which they got it."""

    def __init__(self) -> None:
        self._ready: deque[ResponseStream] = deque()
        self._wake = threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="emitter", daemon=True)
        self._thread.start()

    def notify(self, stream: ResponseStream) -> None:
        """Say that `stream` has something to send."""
        self._ready.append(stream)
        self._wake.release()

    def stop(self) -> None:
        """Send what is pending, then end the thread."""
        self._stopping = True
        self._wake.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            if not self._ready:
                if self._stopping:
                    return
                continue
            try:
                self._ready.popleft().send_pending()
            except Exception:
                log.exception("a response could not be sent")


class MetricsReporter:
    """One thread that copies the loop's counts to Triton's metrics port a few times a second."""

    def __init__(self, loop: EngineLoop, labels: dict[str, str]) -> None:
        self._loop = loop
        self._registered = [_register(family) for family in FAMILIES]  # a family that is let go of disappears
        self._metrics = [
            (family, registered.Metric(labels=labels))
            for family, registered in zip(FAMILIES, self._registered, strict=True)
        ]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-reporter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it is not waited for longer than JOIN_S."""
        self._stop.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stop.wait(REPORT_S):
            for family, metric in self._metrics:
                value = family.read(self._loop)
                if family.kind == "gauge":
                    metric.set(value)
                else:
                    metric.increment(value - metric.value())


def _register(family: MetricFamily) -> Any:
    kind = {"gauge": pb_utils.MetricFamily.GAUGE, "counter": pb_utils.MetricFamily.COUNTER}[family.kind]
    return pb_utils.MetricFamily(name=family.name, description=family.help, kind=kind)


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
        except pb_utils.TritonModelException:
            log.exception("Triton did not say whether request %d is cancelled", stream.key)

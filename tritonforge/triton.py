"""The only file that knows pb_utils: Triton requests in, Triton responses and metrics out, for the model.py files."""

import json
import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tritonforge.errors import STATUS, InvalidRequest, TritonForgeError
from tritonforge.loop import EngineLoop
from tritonforge.metrics import FAMILIES, MetricFamily
from tritonforge.recorder import FINISHED, HISTOGRAMS, REASONS, Recorder, load_buckets
from tritonforge.responses import Tensors
from tritonforge.streams import JOIN_S, typed

REPORT_S = 0.1
"""Pause between two updates of the metrics."""

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def read_options(request: Any) -> dict[str, Any]:
    """The request's parameters, as Triton passed them on, and those that its gRPC endpoint made properties of."""
    flags = request.flags()
    taken = {
        "timeout": request.timeout(),
        "sequence_id": request.correlation_id(),
        "sequence_start": bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
        "sequence_end": bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
    }
    return json.loads(request.parameters()) | {name: value for name, value in taken.items() if value}


def read_tensor(request: Any, name: str) -> np.ndarray | None:
    """The input tensor `name`, or None when an optional one was left out."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def read_text(request: Any, name: str) -> str:
    """The one UTF-8 string of input `name`. Raises InvalidRequest when it is none, naming the byte that is wrong."""
    tensor = read_tensor(request, name)
    if tensor.size != 1:
        raise InvalidRequest(f"{name} must hold one string, got {tensor.size}")
    raw = tensor.reshape(-1)[0]
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
    told = typed(error)
    code = getattr(pb_utils.TritonError, STATUS[told.code].triton)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(told), code))


def load_error(error: TritonForgeError) -> Exception:
    """The exception with which initialize() makes Triton refuse the model and tell why."""
    return pb_utils.TritonModelException(str(error))


class TritonSender:
    """The Sender of streams.py over Triton's response sender."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()

    def send(self, tensors: Tensors, *, final: bool) -> None:
        """Send one response; the last one closes the request."""
        self._sender.send(response(**tensors), flags=FINAL if final else 0)

    def fail(self, error: Exception) -> None:
        """Send `error` as the last response."""
        self._sender.send(error_response(error), flags=FINAL)

    def end(self) -> None:
        """Tell Triton that there is no further response."""
        self._sender.send(flags=FINAL)

    def is_cancelled(self) -> bool:
        """Whether the client cancelled or left."""
        return self._sender.is_cancelled()


class MetricsReporter:
    """One thread that copies the loop's counts, and what `recorder` took down, to Triton's metrics port.

    Only what changed is told: each call goes to the server and back, and holds the interpreter's lock meanwhile.
    Raises NotFound or ReleaseMismatch when the histograms' buckets are wrong.
    """

    def __init__(self, loop: EngineLoop, labels: dict[str, str], recorder: Recorder | None = None) -> None:
        self._loop, self._recorder = loop, recorder or Recorder()
        self._requests = RequestMetrics(labels)
        self._registered = [_register(family) for family in FAMILIES]  # a family that is let go of disappears
        self._metrics = [
            (family, registered.Metric(labels=labels))
            for family, registered in zip(FAMILIES, self._registered, strict=True)
        ]
        self._told = [metric.value() for _, metric in self._metrics]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-reporter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it is not waited for longer than JOIN_S."""
        self._stop.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stop.wait(REPORT_S):
            self._requests.add(*self._recorder.take())
            for index, (family, metric) in enumerate(self._metrics):
                value, told = family.read(self._loop), self._told[index]
                if value == told:
                    continue
                if family.kind == "gauge":
                    metric.set(value)
                else:
                    metric.increment(value - told)
                self._told[index] = value


class RequestMetrics:
    """Triton's metrics of finished requests: a counter by reason, and the histograms."""

    def __init__(self, labels: dict[str, str]) -> None:
        buckets, kinds = load_buckets(), pb_utils.MetricFamily
        self._families = [  # a family that is let go of disappears
            kinds(name=family.name, description=family.help, kind=kinds.HISTOGRAM) for family in HISTOGRAMS
        ]
        self._histograms = {
            family.name: registered.Metric(labels=labels, buckets=buckets[family.name])
            for family, registered in zip(HISTOGRAMS, self._families, strict=True)
        }
        self._finished = kinds(name=FINISHED, description="Requests that ended, by reason", kind=kinds.COUNTER)
        self._counters = {
            reason: self._finished.Metric(labels={**labels, "finish_reason": reason}) for reason in REASONS
        }

    def add(self, counts: dict[str, int], observed: list[tuple[str, float]]) -> None:
        """Add what Recorder.take() returns."""
        for reason, count in counts.items():
            self._counters[reason].increment(count)
        for name, seconds in observed:
            self._histograms[name].observe(seconds)


def _register(family: MetricFamily) -> Any:
    kind = {"gauge": pb_utils.MetricFamily.GAUGE, "counter": pb_utils.MetricFamily.COUNTER}[family.kind]
    return pb_utils.MetricFamily(name=family.name, description=family.help, kind=kind)

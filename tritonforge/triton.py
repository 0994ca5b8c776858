"""The only file that knows pb_utils: Triton requests in, Triton responses and metrics out, for the model.py files."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tritonforge.errors import STATUS, InvalidRequest, SetupError, TritonForgeError
from tritonforge.loop import EngineLoop
from tritonforge.observation.health import Health
from tritonforge.observation.logs import RequestLog
from tritonforge.observation.metric_family import Kind
from tritonforge.observation.observation import Observation
from tritonforge.observation.recorder import Recorder
from tritonforge.observation.reporter import Reporter
from tritonforge.responses import Tensors
from tritonforge.streams import typed

if TYPE_CHECKING:  # loads OpenTelemetry
    from tritonforge.observation.tracing import Tracing

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
    options = json.loads(request.parameters())
    for name in [one for one in options if one.lower() == "traceparent"]:  # a header's name comes as it was written
        options["traceparent"] = options.pop(name)
    return options | {name: value for name, value in taken.items() if value}


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
        self.request_id: str = request.request_id()

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
    """What is told of the decoder while it runs: metrics, the request log, traces; and the watchdog on its steps.

    Raises NotFound, ReleaseMismatch or InvalidRequest when the buckets or settings of the environment are wrong, and
    SetupError when traces are wanted and OpenTelemetry is not installed.
    """

    def __init__(self, loop: EngineLoop, labels: dict[str, str], recorder: Recorder | None = None) -> None:
        recorder, settings = recorder or Recorder(), Observation.read()
        requests = RequestLog(settings, recorder, loop.decode, labels)
        self._tracing = open_tracing(settings, labels)
        health = Health(loop, stall_timeout_s=settings.stall_timeout_s)
        consumers = [requests.write, *([] if self._tracing is None else [self._tracing.export])]
        reporter = Reporter(loop, labels, recorder, TritonFamily, health, consumers, requests.look)
        self._threads = (health, reporter) if settings.metrics else ()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads; none is waited for longer than JOIN_S."""
        for thread in self._threads:
            thread.stop()
        if self._tracing is not None:
            self._tracing.close()


def open_tracing(settings: Observation, labels: Mapping[str, str]) -> "Tracing | None":
    """The traces of `settings`; None without an endpoint."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from tritonforge.observation.tracing import Tracing
    except ImportError as error:
        remedy = "run `pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http`"
        raise SetupError(f"traces need OpenTelemetry ({error}); {remedy}") from None
    return Tracing(settings.otlp_endpoint, settings.trace_ratio, labels)


class TritonFamily:
    """A metric family on Triton's metrics port; it disappears when it is let go of."""

    def __init__(self, name: str, what: str, kind: Kind) -> None:
        kinds = pb_utils.MetricFamily
        triton_kind = {"gauge": kinds.GAUGE, "counter": kinds.COUNTER, "histogram": kinds.HISTOGRAM}[kind]
        self._family = kinds(name=name, description=what, kind=triton_kind)

    def metric(self, labels: Mapping[str, str], buckets: Sequence[float] | None = None) -> Any:
        """One series of the family; a histogram's with the upper bounds of its `buckets`."""
        if buckets is None:
            return self._family.Metric(labels=dict(labels))
        return self._family.Metric(labels=dict(labels), buckets=list(buckets))

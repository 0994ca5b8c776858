"""Requests that go where the route says: reads it from the server, keeps it a moment, and sends each request there.

For callers of `llm` that take part in a canary. It knows tritonclient's messages; what to choose is in routing.py.
"""

import threading
import time
from collections.abc import Iterator

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tritonforge.client import Chunk, rpc_error, stream
from tritonforge.errors import InvalidRequest, NotFound, Overloaded
from tritonforge.rollout.routing import CANARY_MODEL, REFRESH_S, STABLE_MODEL, Route, Target

FETCH_TIMEOUT_S = 10.0


def fetch_route(channel: grpc.Channel, timeout: float = FETCH_TIMEOUT_S) -> Route:
    """The present route of the server. Raises a typed error when it cannot be read, or the server tells none."""
    stable = _parameters(channel, STABLE_MODEL, timeout)
    try:
        canary = _parameters(channel, CANARY_MODEL, timeout)
    except (NotFound, Overloaded):  # there is none, or it is being unloaded
        canary = None
    return Route.of_parameters(stable, canary)


class Router:
    """Streams of one server; safe to use from several threads. The route is read again after REFRESH_S."""

    def __init__(self, channel: grpc.Channel, *, refresh_s: float = REFRESH_S) -> None:
        self._channel, self._refresh_s = channel, refresh_s
        self._lock = threading.Lock()
        self._route: Route | None = None
        self._read_at = float("-inf")

    def route(self) -> Route:
        """The route, at most `refresh_s` old."""
        with self._lock:
            if self._route is None or time.monotonic() - self._read_at >= self._refresh_s:
                read_at = time.monotonic()
                self._route, self._read_at = fetch_route(self._channel), read_at
            return self._route

    def target(self, request: service_pb2.ModelInferRequest) -> Target:
        """Where `request` for `llm` goes; its tenant is its option of that name."""
        if request.model_name != STABLE_MODEL:
            raise InvalidRequest(f"only requests for {STABLE_MODEL} are routed, got one for {request.model_name}")
        tenant = request.parameters["tenant"].string_param if "tenant" in request.parameters else ""
        return self.route().target(request.id, tenant)

    def stream(self, request: service_pb2.ModelInferRequest, timeout: float | None = None) -> Iterator[Chunk]:
        """Like client.stream(). A canary that is gone before its first response is no failure: the stable answers."""
        routed = service_pb2.ModelInferRequest()
        routed.CopyFrom(request)
        target, started = self.target(request), False
        routed.model_name = target.model
        if target.model != STABLE_MODEL:  # so that it can be cancelled there before its first response
            routed.model_version = str(target.version)
        try:
            for chunk in stream(self._channel, routed, timeout):
                started = True
                yield chunk
        except (NotFound, Overloaded):
            if started or routed.model_name == STABLE_MODEL:
                raise
            yield from stream(self._channel, request, timeout)


def _parameters(channel: grpc.Channel, model: str, timeout: float) -> dict[str, str]:
    try:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelConfig(
            service_pb2.ModelConfigRequest(name=model), timeout=timeout
        )
    except grpc.RpcError as error:
        raise rpc_error(error) from None
    return {name: value.string_value for name, value in answer.config.parameters.items()}

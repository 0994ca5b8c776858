"""One request over a gRPC stream, timed: when it was sent, when each response with tokens came, how it ended.

The arrivals greenlets call `Stream.run`; a watchdog ends it from outside with `stop`. It must not know schedules or
statistics. Responses are stamped before they are parsed.
"""

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtests.records import ERROR, OK, SHED, complete_statistics
from loadtests.schedule import Slot
from tritonforge.client import CHANNEL_OPTIONS, NO_PROXY, infer_request, is_final, parse_response, rpc_error
from tritonforge.errors import Overloaded, TritonForgeError
from tritonforge.ports import is_loopback

NO_RETRIES = ("grpc.enable_retries", 0)
"""gRPC's own retries would hide failures: every attempt is recorded as one."""


def open_channel(url: str) -> grpc.Channel:
    """A channel to host:port, shared by all streams of a worker. Does not connect yet."""
    target = url.removeprefix("grpc://")
    proxy = NO_PROXY if is_loopback(target) else ()
    return grpc.insecure_channel(target, options=(*CHANNEL_OPTIONS, NO_RETRIES, *proxy))


def build_request(model: str, slot: Slot, prompt: str, request_id: str) -> service_pb2.ModelInferRequest:
    """The request of a slot: streamed, with its output length forced."""
    options = {"max_tokens": slot.output_tokens, "ignore_eos": True, "stream": True}
    return infer_request(model, text=prompt, request_id=request_id, **options)


@dataclass
class Ending:
    """How a request ended: a status of records, the code and text of an error, what the last response carried."""

    status: str
    code: str | None = None
    detail: str | None = None
    finish_reason: str | None = None
    statistics: dict[str, int] | None = None
    model_version: str | None = None


@dataclass
class Stream:
    """One open request. `last_ns` is when it last showed life; times are those of the monotonic clock."""

    request: service_pb2.ModelInferRequest
    wanted_tokens: int
    sent_ns: int = 0
    last_ns: int = 0
    end_ns: int = 0
    chunks: list[tuple[int, int]] = field(default_factory=list)
    _call: grpc.Call | None = None
    _stopped: Ending | None = None

    def run(self, stub: service_pb2_grpc.GRPCInferenceServiceStub, deadline_s: float) -> Ending:
        """Send the request, read its stream to the end and say how it ended. Never raises for what a server can do."""
        self.sent_ns = self.last_ns = time.perf_counter_ns()
        ending = Ending(ERROR, "ABANDONED", "the client gave the request up")
        try:
            self._call = stub.ModelStreamInfer(iter((self.request,)), timeout=deadline_s + 5)
            ending = self._read(self._call)
        except grpc.RpcError as error:
            ending = _failed(rpc_error(error))
        except TritonForgeError as error:
            ending = _failed(error)
        except (ValueError, struct.error, KeyError) as error:  # tensors that are not what the contract says
            ending = Ending(ERROR, "MALFORMED", str(error))
        finally:
            self.end_ns = time.perf_counter_ns()
            if self._call is not None:
                self._call.cancel()
        return self._stopped or ending

    def stop(self, ending: Ending) -> bool:
        """End the call from outside, with this ending; False when it has ended or was stopped before."""
        if self._stopped is not None or self.end_ns:
            return False
        self._stopped = ending
        if self._call is not None:
            self._call.cancel()
        return True

    def _read(self, responses: Iterator[service_pb2.ModelStreamInferResponse]) -> Ending:
        last, version = None, None
        for response in responses:
            self.last_ns = at = time.perf_counter_ns()
            chunk = parse_response(response)
            version = response.infer_response.model_version or version
            if last is not None:
                return Ending(ERROR, "AFTER_FINAL", "a response came after the final one")
            if chunk.token_ids:
                self.chunks.append((at, len(chunk.token_ids)))
            if is_final(response):
                last = chunk
        if last is None:
            return Ending(ERROR, "TRUNCATED", "the stream ended without a final response", model_version=version)
        return self._complete(last.finish_reason, last.statistics, version)

    def _complete(self, reason: str | None, statistics: dict[str, int] | None, version: str | None) -> Ending:
        """ok only for all the tokens that were asked for: the output length is forced, so fewer is a broken answer."""
        received = sum(count for _, count in self.chunks)
        ending = Ending(OK, None, None, reason, complete_statistics(statistics), version)
        if received != self.wanted_tokens:
            ending.status, ending.code = ERROR, "WRONG_LENGTH" if received else "EMPTY"
            ending.detail = f"{received} tokens came, {self.wanted_tokens} were asked for, finish_reason {reason}"
        return ending


def _failed(error: TritonForgeError) -> Ending:
    """shed when the service refuses for want of room; every other failure is an error."""
    return Ending(SHED if isinstance(error, Overloaded) else ERROR, error.code, str(error)[:500])


def on_channel(channel: grpc.Channel) -> service_pb2_grpc.GRPCInferenceServiceStub:
    """The inference service of a channel."""
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)

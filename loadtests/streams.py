"""One request over a gRPC stream, timed: when it was sent, when each response with tokens came, how it ended.

The arrivals greenlets call `Stream.run`; a watchdog ends it from outside with `stop`. It must not know schedules or
statistics. Responses are stamped before they are parsed.
"""

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtests.records import CANCELLED, ERROR, OK, SHED, complete_statistics
from loadtests.schedule import Slot
from loadtests.workload import Slow
from tritonforge.client import CHANNEL_OPTIONS, NO_PROXY, infer_request, is_final, parse_response, rpc_error
from tritonforge.errors import Overloaded, TritonForgeError
from tritonforge.launch.ports import is_loopback

SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
"""Of a slow reader: with HTTP/2's own windows, tens of thousands of messages would be read ahead for it."""
NO_RETRIES = ("grpc.enable_retries", 0)
"""gRPC's own retries would hide failures: every attempt is recorded as one."""


def open_channel(url: str, *more: tuple[str, int]) -> grpc.Channel:
    """A channel to host:port, shared by all streams of a worker. Does not connect yet."""
    target = url.removeprefix("grpc://")
    proxy = NO_PROXY if is_loopback(target) else ()
    return grpc.insecure_channel(target, options=(*CHANNEL_OPTIONS, NO_RETRIES, *proxy, *more))


def build_request(
    model: str, slot: Slot, prompt: str, request_id: str, **options: bool | int | float | str
) -> service_pb2.ModelInferRequest:
    """The request of a slot: streamed, with its output length forced unless `options` say otherwise."""
    options = {"max_tokens": slot.output_tokens, "ignore_eos": True, "stream": True} | options
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


@dataclass(kw_only=True)
class StreamBase:
    """One open request. `last_ns` is when it last showed life; times are those of the monotonic clock.

    `forced`: the answer must have exactly `wanted_tokens`. `slow` makes it a reader that pauses. `on_tokens` is called
    with the number of tokens so far, after each response. `keep_text` keeps the answer.
    """

    wanted_tokens: int
    forced: bool = True
    slow: Slow | None = None
    keep_text: bool = False
    on_tokens: Callable[[int], None] | None = None
    sent_ns: int = 0
    last_ns: int = 0
    end_ns: int = 0
    cancel_ns: int | None = None
    paused: bool = False
    chunks: list[tuple[int, int]] = field(default_factory=list)
    received: int = 0
    text: list[str] = field(default_factory=list)
    _stopped: Ending | None = None

    def add(self, at: int, tokens: int, text: str) -> None:
        """Note a response that came at `at`; a slow reader then stops reading for a while, once."""
        if self.keep_text:
            self.text.append(text)
        if not tokens:
            return
        before, self.received = self.received, self.received + tokens
        self.chunks.append((at, tokens))
        if self.on_tokens is not None:
            self.on_tokens(self.received)
        if self.slow is not None and before < self.slow.after_tokens <= self.received:
            self.paused = True
            time.sleep(self.slow.pause_s)
            self.last_ns, self.paused = time.perf_counter_ns(), False

    def stop(self, ending: Ending) -> bool:
        """End the call from outside, with this ending; False when it has ended or was stopped before."""
        if self._stopped is not None or self.end_ns:
            return False
        self._stopped = ending
        self._close()
        return True

    def _close(self) -> None:
        """End the call."""

    def complete(self, reason: str | None, statistics: dict[str, int] | None, version: str | None) -> Ending:
        """ok only for all the tokens that were asked for, where the length is forced: fewer is a broken answer."""
        ending = Ending(OK, None, None, reason, complete_statistics(statistics), version)
        if reason == "cancelled":
            asked = self.cancel_ns is not None
            ending.status, ending.code = (CANCELLED, None) if asked else (ERROR, "CANCELLED")
        elif (self.forced and self.received != self.wanted_tokens) or not self.received:
            ending.status, ending.code = ERROR, "WRONG_LENGTH" if self.received else "EMPTY"
            ending.detail = f"{self.received} tokens came, {self.wanted_tokens} were asked for, finish_reason {reason}"
        return ending


@dataclass(kw_only=True)
class Stream(StreamBase):
    """One open request over gRPC."""

    request: service_pb2.ModelInferRequest
    _call: grpc.Call | None = None

    @property
    def request_id(self) -> str:
        return self.request.id

    def run(self, stub: service_pb2_grpc.GRPCInferenceServiceStub, deadline_s: float) -> Ending:
        """Send the request, read its stream to the end and say how it ended. Never raises for what a server can do."""
        self.sent_ns = self.last_ns = time.perf_counter_ns()
        ending = Ending(ERROR, "ABANDONED", "the client gave the request up")
        try:
            self._call = stub.ModelStreamInfer(iter((self.request,)), timeout=deadline_s + 5)
            ending = self._read(self._call)
        except grpc.RpcError as error:
            ending = failed(rpc_error(error))
        except TritonForgeError as error:
            ending = failed(error)
        except (ValueError, struct.error, KeyError) as error:  # tensors that are not what the contract says
            ending = Ending(ERROR, "MALFORMED", str(error))
        finally:
            self.end_ns = time.perf_counter_ns()
            self._close()
        return self._stopped or ending

    def _close(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _read(self, responses: Iterator[service_pb2.ModelStreamInferResponse]) -> Ending:
        last, version = None, None
        for response in responses:
            self.last_ns = at = time.perf_counter_ns()
            chunk = parse_response(response)
            version = response.infer_response.model_version or version
            if last is not None:
                return Ending(ERROR, "AFTER_FINAL", "a response came after the final one")
            self.add(at, len(chunk.token_ids), chunk.text)
            if is_final(response):
                last = chunk
        if last is None:
            return Ending(ERROR, "TRUNCATED", "the stream ended without a final response", model_version=version)
        return self.complete(last.finish_reason, last.statistics, version)


def failed(error: TritonForgeError) -> Ending:
    """shed when the service refuses for want of room; every other failure is an error."""
    return Ending(SHED if isinstance(error, Overloaded) else ERROR, error.code, str(error)[:500])


def on_channel(channel: grpc.Channel) -> service_pb2_grpc.GRPCInferenceServiceStub:
    """The inference service of a channel."""
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)

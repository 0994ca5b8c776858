"""A gRPC server of known truth, and its lying and broken relatives: what the verifier itself is tested against.

It answers ModelStreamInfer for `llm` with words of known timing, and it knows nothing of contracts or verdicts. It runs
on a thread of the test process; the load comes from another process.
"""

import asyncio
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tritonforge.contract import FINISH_REASON, STATISTICS, TEXT_OUTPUT, TOKEN_IDS

Statistics = dict[str, int]


@dataclass
class Behaviour:
    """How the stub answers. The honest default: first token after 20 ms, then one every 5 ms.

    Faults: `fail_in_band_at` and `hang_at` are a number of tokens after which a request breaks, for one request in
    `every`; `stall_s` is one long gap in the middle; `freeze` (start, length, since the first request) halts all.
    `lie` changes the statistics of the last response.
    """

    first_s: float = 0.020
    gap_s: float = 0.005
    every: int = 1
    fail_in_band_at: int | None = None
    fail_message: str = "INTERNAL: the stub was told to fail"
    hang_at: int | None = None
    stall_s: float = 0.0
    freeze: tuple[float, float] | None = None
    no_responses: bool = False
    no_final: bool = False
    drop_tokens: int = 0
    one_response: bool = False
    version: str = "1"
    lie: Callable[[Statistics], Statistics] = field(default=lambda statistics: statistics)


def _tensor(response: service_pb2.ModelInferResponse, name: str, datatype: str, shape: list[int], raw: bytes) -> None:
    response.outputs.add(name=name, datatype=datatype, shape=shape)
    response.raw_output_contents.append(raw)


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<I", len(data)) + data


class Stub(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves on `url` from `with Stub(...)` on. `open` counts the streams that are running."""

    def __init__(self, behaviour: Behaviour | None = None):
        self.behaviour = behaviour or Behaviour()
        self.url, self.seen, self.open, self.cancelled_ids = "", 0, 0, []
        self._counts, self._started = {"success": 0, "fail": 0}, 0.0
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Stub":
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._stop = asyncio.Event()
        await self._server.start()
        self._ready.set()
        await self._stop.wait()
        await self._server.stop(0.1)

    async def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=request.name == "llm")

    async def ServerMetadata(self, request, context):
        return service_pb2.ServerMetadataResponse(name="stub", version="1.0")

    async def ModelMetadata(self, request, context):
        return service_pb2.ModelMetadataResponse(name=request.name, versions=[self.behaviour.version])

    async def ModelStatistics(self, request, context):
        answer = service_pb2.ModelStatisticsResponse()
        stats = answer.model_stats.add(name=request.name, version="1").inference_stats
        stats.success.count, stats.fail.count = self._counts["success"], self._counts["fail"]
        return answer

    async def ModelStreamInfer(self, requests: AsyncIterator, context):
        async for request in requests:
            if request.model_name == "decoder":
                self.cancelled_ids.append(request.parameters["cancel"].string_param)
                yield self._error("NOT_FOUND: no such request")
                return
            self.seen += 1
            self._started = self._started or time.monotonic()
            self.open += 1
            try:
                async for response in self._answer(request, broken=self.seen % self.behaviour.every == 0):
                    yield response
            finally:
                self.open -= 1
                self._counts["success"] += 1

    async def _pause(self, seconds: float) -> None:
        """Sleep, and through a freeze."""
        await asyncio.sleep(seconds)
        if self.behaviour.freeze is not None:
            start, length = self.behaviour.freeze
            since = time.monotonic() - self._started
            if start <= since < start + length:
                await asyncio.sleep(start + length - since)

    async def _answer(self, request, *, broken: bool):
        """The responses to one request, as the behaviour says; `broken` when it is one of the faulty ones."""
        behaviour, started = self.behaviour, time.monotonic()
        if broken and behaviour.no_responses:
            return
        tokens = request.parameters["max_tokens"].int64_param
        tokens -= behaviour.drop_tokens if broken else 0
        prompt = len(request.raw_input_contents[0][4:].split())
        first = started
        for k in range(tokens):
            if broken and k == behaviour.fail_in_band_at:
                yield self._error(behaviour.fail_message)
                return
            if broken and k == behaviour.hang_at:
                await asyncio.sleep(3600)
            await self._pause(behaviour.first_s if k == 0 else behaviour.gap_s)
            if broken and behaviour.stall_s and k == tokens // 2:
                await asyncio.sleep(behaviour.stall_s)
            first = time.monotonic() if k == 0 else first
            if k < tokens - 1 and not behaviour.one_response:
                yield self._response(request, [k])
        if broken and behaviour.no_final:
            return
        ids = list(range(tokens)) if behaviour.one_response else [tokens - 1]
        now = time.monotonic()
        spent = {"prefill_us": first - started, "decode_us": now - first}
        statistics = {tensor.name: 0 for tensor in STATISTICS}
        statistics |= {name: int(seconds * 1e6) for name, seconds in spent.items()}
        statistics |= {"prompt_tokens": prompt, "completion_tokens": tokens, "decode_steps": tokens - 1}
        yield self._response(request, ids, behaviour.lie(statistics) if broken else statistics)

    def _response(self, request, ids: list[int], statistics: Statistics | None = None):
        infer = service_pb2.ModelInferResponse(
            model_name=request.model_name, model_version=self.behaviour.version, id=request.id
        )
        _tensor(infer, TEXT_OUTPUT.name, "BYTES", [1, 1], _text(" word" * len(ids)))
        _tensor(infer, TOKEN_IDS.name, "INT32", [1, len(ids)], struct.pack(f"<{len(ids)}i", *ids))
        if statistics is not None:
            _tensor(infer, FINISH_REASON.name, "BYTES", [1, 1], _text("length"))
            for name, value in statistics.items():
                _tensor(infer, name, "INT64", [1, 1], struct.pack("<q", value))
        infer.parameters["triton_final_response"].bool_param = statistics is not None
        return service_pb2.ModelStreamInferResponse(infer_response=infer)

    @staticmethod
    def _error(message: str):
        infer = service_pb2.ModelInferResponse()
        infer.parameters["triton_final_response"].bool_param = True
        return service_pb2.ModelStreamInferResponse(error_message=message, infer_response=infer)

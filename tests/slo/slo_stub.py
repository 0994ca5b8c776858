"""A gRPC server of known truth, and its lying and broken relatives: what the verifier itself is tested against.

It answers ModelStreamInfer for `llm` with words of known timing, and it knows nothing of contracts or verdicts. It runs
on a thread of the test process; the load comes from another process.
"""

import asyncio
import json
import random
import struct
import threading
import time
from collections.abc import AsyncIterator

import grpc
from slo_behaviour import Behaviour, Statistics
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tritonforge.contract import FINISH_REASON, STATISTICS, TEXT_OUTPUT, TOKEN_IDS


def _tensor(response: service_pb2.ModelInferResponse, name: str, datatype: str, shape: list[int], raw: bytes) -> None:
    response.outputs.add(name=name, datatype=datatype, shape=shape)
    response.raw_output_contents.append(raw)


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<I", len(data)) + data


def _event(response: service_pb2.ModelStreamInferResponse) -> dict:
    """A response as Triton's HTTP front end writes it: tensors of one element are scalars."""
    if response.error_message:
        return {"error": response.error_message}
    infer, event = response.infer_response, {"model_name": "llm", "model_version": "1"}
    for output, raw in zip(infer.outputs, infer.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            values: list = [raw[4:].decode()]
        else:
            code, size = {"INT32": ("i", 4), "INT64": ("q", 8)}[output.datatype]
            values = list(struct.unpack(f"<{len(raw) // size}{code}", raw))
        event[output.name] = values[0] if len(values) == 1 else values
    return event


class Stub(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves on `url` from `with Stub(...)` on. `open` counts the streams that are running."""

    def __init__(self, behaviour: Behaviour | None = None):
        self.behaviour = behaviour or Behaviour()
        self.url, self.http_url, self.seen, self.open, self.cancelled_ids = "", "", 0, 0, []
        self.parameters: list[dict] = []
        self.http_bodies: list[dict] = []
        self._cancels: dict[str, float] = {}
        self._jitter = random.Random(0)
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
        http = await asyncio.start_server(self._serve_http, "127.0.0.1", 0)
        self.http_url = f"127.0.0.1:{http.sockets[0].getsockname()[1]}"
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
                name = request.parameters["cancel"].string_param
                self.cancelled_ids.append(name)
                if name not in self._cancels:
                    yield self._error("NOT_FOUND: no such request")
                    return
                self._cancels[name] = time.monotonic() + self.behaviour.cancel_takes_s
                yield self._response(request, [], dict.fromkeys((tensor.name for tensor in STATISTICS), 0))
                return
            self.seen += 1
            self._started = self._started or time.monotonic()
            self.open += 1
            self._cancels[request.id] = float("inf")
            kinds = ("int64_param", "string_param", "bool_param", "double_param")
            self.parameters.append({k: getattr(v, next(x for x in kinds if v.HasField(x))) for k, v in
                                    request.parameters.items()})  # fmt: skip
            try:
                async for response in self._answer(request, broken=self.seen % self.behaviour.every == 0):
                    yield response
            finally:
                self.open -= 1
                self._cancels.pop(request.id, None)
                self._counts["success"] += 1

    async def _pause(self, seconds: float) -> None:
        """Sleep, and through a freeze."""
        await asyncio.sleep(seconds * (1 + self.behaviour.jitter * self._jitter.uniform(-1, 1)))
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
        if broken and behaviour.refuse_first and "." not in request.id:
            yield self._error("UNAVAILABLE: the queue is full, retry in about 1 s")
            return
        if behaviour.late_limit_s is not None and self.open * behaviour.first_s > behaviour.late_limit_s:
            yield self._error("INTERNAL: dropped")
            return
        tokens = request.parameters["max_tokens"].int64_param
        tokens -= behaviour.drop_tokens if broken else 0
        prompt = len(request.raw_input_contents[0][4:].split())
        first = started
        words = [" word"] * tokens
        if behaviour.answer is not None:
            words = [*(f" {word}" for word in behaviour.answer(request.raw_input_contents[0][4:].decode()).split())]
            tokens = len(words)
        sent, per = 0, behaviour.tokens_per_response
        for k in range(tokens):
            if time.monotonic() >= self._cancels.get(request.id, float("inf")):
                yield self._last(request, [], "", k, prompt, started, first, "cancelled")
                return
            if broken and k == behaviour.fail_in_band_at:
                yield self._error(behaviour.fail_message)
                return
            if broken and k == behaviour.hang_at:
                await asyncio.sleep(3600)
            await self._pause(behaviour.first_s if k == 0 else behaviour.gap_s)
            if broken and behaviour.stall_s and k == tokens // 2:
                await asyncio.sleep(behaviour.stall_s)
            first = time.monotonic() if k == 0 else first
            if k < tokens - 1 and not behaviour.one_response and (k + 1) % per == 0:
                yield self._response(request, list(range(sent, k + 1)), text="".join(words[sent : k + 1]))
                sent = k + 1
        if broken and behaviour.no_final:
            return
        ids = list(range(sent, tokens))
        lie = behaviour.lie if broken else None
        yield self._last(request, ids, "".join(words[sent:]), tokens, prompt, started, first, "length", lie)

    def _last(self, request, ids, text, tokens, prompt, started, first, reason, lie=None):
        """The last response, with the request's statistics."""
        now = time.monotonic()
        spent = {"prefill_us": first - started, "decode_us": now - first}
        statistics = {tensor.name: 0 for tensor in STATISTICS}
        statistics |= {name: int(seconds * 1e6) for name, seconds in spent.items()}
        statistics |= {"prompt_tokens": prompt, "completion_tokens": tokens, "decode_steps": max(tokens - 1, 0)}
        return self._response(request, ids, lie(statistics) if lie else statistics, text=text, reason=reason)

    def _response(self, request, ids: list[int], statistics: Statistics | None = None, *, text="", reason="length"):
        infer = service_pb2.ModelInferResponse(
            model_name=request.model_name, model_version=self.behaviour.version, id=request.id
        )
        _tensor(infer, TEXT_OUTPUT.name, "BYTES", [1, 1], _text(text))
        _tensor(infer, TOKEN_IDS.name, "INT32", [1, len(ids)], struct.pack(f"<{len(ids)}i", *ids))
        if statistics is not None:
            _tensor(infer, FINISH_REASON.name, "BYTES", [1, 1], _text(reason))
            for name, value in statistics.items():
                _tensor(infer, name, "INT64", [1, 1], struct.pack("<q", value))
        infer.parameters["triton_final_response"].bool_param = statistics is not None
        return service_pb2.ModelStreamInferResponse(infer_response=infer)

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """POST .../generate_stream: the same answers as server-sent events in chunks."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(next(line for line in head.split("\r\n") if line.lower().startswith("content-length")).split()[1])
        body = json.loads(await reader.readexactly(length))
        self.seen += 1
        request = service_pb2.ModelInferRequest(model_name="llm", id=f"http-{self.seen}")
        request.parameters["max_tokens"].int64_param = body["max_tokens"]
        request.raw_input_contents.append(_text(body["text_input"]))
        self.http_bodies.append(body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.open += 1
        try:
            async for response in self._answer(request, broken=self.seen % self.behaviour.every == 0):
                data = b"data: " + json.dumps(_event(response)).encode() + b"\n\n"
                writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            self._counts["success"] += 1
            writer.close()

    @staticmethod
    def _error(message: str):
        infer = service_pb2.ModelInferResponse()
        infer.parameters["triton_final_response"].bool_param = True
        return service_pb2.ModelStreamInferResponse(error_message=message, infer_response=infer)

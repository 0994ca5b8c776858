"""A server of known truth, in a process of its own: what the load generator is calibrated against.

`calibrate` starts it. It answers ModelStreamInfer for `llm` with one token every `gap_s`; the text of each response is
the time at which it was handed to gRPC, in nanoseconds of the machine's monotonic clock, so that a client on the same
machine knows what it adds.
"""

import argparse
import asyncio
import struct
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tritonforge.contract import FINISH_REASON, STATISTICS, TEXT_OUTPUT, TOKEN_IDS


def _tensor(response: service_pb2.ModelInferResponse, name: str, datatype: str, raw: bytes) -> None:
    response.outputs.add(name=name, datatype=datatype, shape=[1, 1])
    response.raw_output_contents.append(raw)


def _text(value: str) -> bytes:
    return struct.pack("<I", len(value)) + value.encode()


class KnownServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """First token after `first_s`, then one every `gap_s`, due at absolute times: lateness does not add up."""

    def __init__(self, first_s: float, gap_s: float):
        self._first_s, self._gap_s = first_s, gap_s
        self._served = 0

    async def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=True)

    async def ServerMetadata(self, request, context):
        return service_pb2.ServerMetadataResponse(name="known", version="1")

    async def ModelMetadata(self, request, context):
        return service_pb2.ModelMetadataResponse(name=request.name, versions=["1"])

    async def ModelStatistics(self, request, context):
        answer = service_pb2.ModelStatisticsResponse()
        answer.model_stats.add(name=request.name, version="1").inference_stats.success.count = self._served
        return answer

    async def ModelStreamInfer(self, requests: AsyncIterator, context):
        async for request in requests:
            started = time.perf_counter()
            tokens = request.parameters["max_tokens"].int64_param
            for k in range(tokens):
                due = started + self._first_s + k * self._gap_s
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                yield self._response(request, k, last=k == tokens - 1, tokens=tokens, started=started)
            self._served += 1

    def _response(self, request, k: int, *, last: bool, tokens: int, started: float):
        infer = service_pb2.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        _tensor(infer, TOKEN_IDS.name, "INT32", struct.pack("<i", k))
        if last:
            _tensor(infer, FINISH_REASON.name, "BYTES", _text("length"))
            values = {tensor.name: 0 for tensor in STATISTICS} | {"completion_tokens": tokens, "prompt_tokens": 1}
            values |= {"prefill_us": int(self._first_s * 1e6), "decode_steps": tokens - 1}
            values["decode_us"] = int(self._gap_s * 1e6) * (tokens - 1)
            for name, value in values.items():
                _tensor(infer, name, "INT64", struct.pack("<q", value))
        infer.parameters["triton_final_response"].bool_param = last
        _tensor(infer, TEXT_OUTPUT.name, "BYTES", _text(f" {time.perf_counter_ns()}"))
        return service_pb2.ModelStreamInferResponse(infer_response=infer)


async def serve(first_s: float, gap_s: float) -> None:
    """Serve on a free port, which is the one line on stdout, until the process is ended."""
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(KnownServer(first_s, gap_s), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-s", type=float, default=0.02)
    parser.add_argument("--gap-s", type=float, default=0.02)
    options = parser.parse_args()
    asyncio.run(serve(options.first_s, options.gap_s))

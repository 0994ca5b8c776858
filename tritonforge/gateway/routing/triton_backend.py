"""The backend that calls `tokenizer` and `decoder` of one Triton server. A replica is one.

`decoder` is called directly, not through the ensemble, so that a request can be ended at any time: by its id, which
also brings the statistics of what it cost until then.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tritonforge.client import (
    CHANNEL_OPTIONS,
    DECODER,
    NO_PROXY,
    Chunk,
    infer_request,
    is_final,
    parse_response,
    rpc_error,
    typed_error,
)
from tritonforge.contract import INPUT_IDS, PROMPT_TRUNCATED_TOKENS
from tritonforge.errors import Cancelled, DeadlineExceeded, InvalidRequest, NotFound, Overloaded, TritonForgeError
from tritonforge.gateway.routing.backend import Prompt, Unreachable
from tritonforge.gateway.routing.model_info import Served
from tritonforge.launch.ports import is_loopback
from tritonforge.rollout.routing import CANARY_MODEL, STABLE_MODEL, Route

if TYPE_CHECKING:  # it imports what imports this
    from tritonforge.gateway.work import Work

TOKENIZER = "tokenizer"
CALL_TIMEOUT_S = 30.0
READY_TIMEOUT_S = 2.0
CANCEL_TIMEOUT_S = 1.0


class TritonBackend:
    """A Triton server that serves a release. Make it inside the event loop that uses it."""

    def __init__(self, url: str) -> None:
        """`url` is host:port of the gRPC endpoint; it need not serve yet."""
        target = url.removeprefix("grpc://")
        options = (*CHANNEL_OPTIONS, *(NO_PROXY if is_loopback(target) else ()))
        self._channel = grpc.aio.insecure_channel(target, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def tokenize(self, text: str, options: Mapping[str, Any], version: str = "") -> Prompt:
        """See Backend. `version` is that of the model; the stable release's without it."""
        request = infer_request(TOKENIZER, text=text, **options)
        request.model_version = version
        try:
            answer = await self._stub.ModelInfer(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _unary_error(error) from None
        raw = dict(zip((output.name for output in answer.outputs), answer.raw_output_contents, strict=True))
        ids, truncated = raw[INPUT_IDS.name], raw[PROMPT_TRUNCATED_TOKENS.name]
        return Prompt(struct.unpack(f"<{len(ids) // 4}i", ids), struct.unpack("<i", truncated)[0])

    def generate(
        self,
        prompt: Prompt,
        options: Mapping[str, Any],
        request_id: str,
        work: "Work | None" = None,
        version: str = "",
    ) -> "TritonGeneration":
        """See Backend. `version` is that of the model; the stable release's without it."""
        request = infer_request(DECODER, input_ids=prompt.token_ids, request_id=request_id, **options)
        request.model_version = version
        if prompt.truncated_tokens is not None:
            name = PROMPT_TRUNCATED_TOKENS.name
            request.inputs.add(name=name, datatype="INT32", shape=(1, 1))
            request.raw_input_contents.append(struct.pack("<i", prompt.truncated_tokens))
        return TritonGeneration(self._stub, request)

    async def ready(self) -> bool:
        """See Backend: both models are loaded and say so."""
        try:
            for model in (TOKENIZER, DECODER):
                request = service_pb2.ModelReadyRequest(name=model)
                if not (await self._stub.ModelReady(request, timeout=READY_TIMEOUT_S)).ready:
                    return False
        except grpc.RpcError:
            return False
        return True

    async def route(self) -> Route | None:
        """The server's releases and their shares; None when it serves a release without saying so.

        Raises TritonForgeError when it does not tell now: what it told before may still hold.
        """
        try:
            stable = await self._parameters(STABLE_MODEL)
        except NotFound:
            return None
        try:
            canary = await self._parameters(CANARY_MODEL)
        except Unreachable:
            raise
        except (NotFound, Overloaded):  # there is none, or it is being unloaded
            canary = None
        try:
            return Route.of_parameters(stable, canary)
        except InvalidRequest:
            return None

    async def _parameters(self, model: str) -> dict[str, str]:
        try:
            request = service_pb2.ModelConfigRequest(name=model)
            answer = await self._stub.ModelConfig(request, timeout=READY_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _unary_error(error) from None
        return {name: value.string_value for name, value in answer.config.parameters.items()}

    async def close(self) -> None:
        """See Backend."""
        await self._channel.close()


class TritonGeneration:
    """See Generation: one call of `decoder`."""

    def __init__(self, stub: service_pb2_grpc.GRPCInferenceServiceStub, request: service_pb2.ModelInferRequest) -> None:
        self._stub, self._request = stub, request
        self.served: Served | None = None
        self._call: grpc.aio.StreamStreamCall | None = None
        self._reading: asyncio.Future | None = None
        self._ended = False

    async def chunks(self) -> AsyncIterator[Chunk]:
        """See Generation."""
        self._call = self._stub.ModelStreamInfer(iter((self._request,)))
        while not self._ended:
            yield await self._next()

    async def abandon(self) -> dict[str, int] | None:
        """See Generation. The decoder is told by the id; it then ends the stream with what the answer cost."""
        if self._call is None or self._ended:
            return None
        statistics = None
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await self._cancel_by_id()
                while not self._ended:
                    statistics = (await self._next()).statistics
        except (TritonForgeError, TimeoutError):
            pass  # it has not reached the decoder yet, or the server is gone: closing the call says the same
        finally:
            self._ended = True
            self._call.cancel()
            if self._reading is not None:
                self._reading.cancel()
        return statistics

    async def _next(self) -> Chunk:
        """The next response. Who waits for it may be cancelled: gRPC would end the whole call, so it is shielded."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
            self._reading.add_done_callback(_retrieve)
        try:
            response = await asyncio.shield(self._reading)
            if response is grpc.aio.EOF:
                raise TritonForgeError(f"the stream of request {self._request.id} ended without a final answer")
        except grpc.RpcError as error:
            self._ended = True
            raise _call_error(error) from None
        except TritonForgeError:
            self._ended = True
            raise
        self._reading = None
        self._ended = is_final(response)
        return parse_response(response)

    async def _cancel_by_id(self) -> None:
        """Raises TritonForgeError when the decoder does not know the request (yet, or any more)."""
        request = infer_request(DECODER, input_ids=(), cancel=self._request.id)
        request.model_version = self._request.model_version
        call = self._stub.ModelStreamInfer(iter((request,)))
        try:
            async for response in call:
                parse_response(response)
                if is_final(response):
                    return
        except grpc.RpcError as error:
            raise rpc_error(error) from None
        finally:
            call.cancel()


def _unary_error(error: grpc.RpcError) -> TritonForgeError:
    """A unary call that failed: a model's own message, which begins with its code, is the call's details.

    The time that ran out is that of our call, not of the request: the server is to blame.
    """
    told = typed_error(error.details() or "")
    found = _call_error(error) if type(told) is TritonForgeError else told
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and isinstance(found, DeadlineExceeded):
        return Unreachable("no answer in time")
    return found


def _call_error(error: grpc.RpcError) -> TritonForgeError:
    """A call that failed as a whole: the models tell their own errors in another way, so it is the connection's."""
    told = rpc_error(error)
    if type(told) in (TritonForgeError, Cancelled) or error.code() is grpc.StatusCode.UNAVAILABLE:
        return Unreachable(error.details() or "")
    return told


def _retrieve(reading: asyncio.Future) -> None:
    """Nobody may be left to hear of a call that failed: it is no error of the event loop then."""
    if not reading.cancelled():
        reading.exception()

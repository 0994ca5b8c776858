"""Requests to the served models over gRPC, one call per request: what the command line, tests and load tests share.

It knows the wire contract and tritonclient's protobuf messages. It must not know gevent, locust or a terminal.
"""

import contextlib
import re
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tritonforge.contract import FINISH_REASON, INPUT_IDS, STATISTICS, TEXT_INPUT, TEXT_OUTPUT, TOKEN_IDS
from tritonforge.errors import (
    STATUS,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    TritonForgeError,
)
from tritonforge.launch.ports import is_loopback
from tritonforge.wire_values import encode_text, pack_ids, set_parameter, unpack

DECODER = "decoder"
CHANNEL_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
NO_PROXY = (("grpc.enable_http_proxy", 0),)
CANCEL_TIMEOUT_S = 2.0

_ERRORS = {
    error.code: error for error in (InvalidRequest, NotFound, Cancelled, DeadlineExceeded, Overloaded, TritonForgeError)
}
_CODE = re.compile(rf"\b({'|'.join(STATUS)}): ")
_TRITON_WORDING = (
    (NotFound, ("unknown model",)),
    (InvalidRequest, ("expected", "unexpected", "missing required input", "Unable to parse")),
    (Overloaded, ("not ready", "no available versions", "Exceeds maximum queue size", "not healthy", "is stopping")),
)
"""What Triton itself says, by the words it uses: its in-band messages carry no code."""
_GRPC_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: Cancelled,
    grpc.StatusCode.UNAVAILABLE: Overloaded,
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response of a stream. Only the last one has statistics (counts, microseconds).

    `text` and `finish_reason` are those of the response's first answer, and with n = 1 there is no other. `outputs`
    holds all tensors of the response by their names (see contract.py), as flat tuples of str, int or float. `version`
    is the model version that answered, the number of its release (see routing.py).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    statistics: dict[str, int] | None = None
    outputs: dict[str, tuple] = field(default_factory=dict, compare=False, repr=False)
    version: str = field(default="", compare=False)


def infer_request(
    model: str,
    *,
    text: str | bytes | None = None,
    input_ids: Sequence[int] | None = None,
    request_id: str = "",
    **options: bool | int | float | str | Sequence | None,
) -> service_pb2.ModelInferRequest:
    """Return a request for `model` with a batch of one; without a request id it gets a random one.

    Options travel as request parameters: a list or tuple as a JSON string, None means the option is absent. Nothing is
    checked here that the server checks. Raises InvalidRequest for a value that has no wire form.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id or uuid.uuid4().hex)
    if text is not None:
        data = encode_text(text) if isinstance(text, str) else text
        request.inputs.add(name=TEXT_INPUT.name, datatype="BYTES", shape=(1, 1))
        request.raw_input_contents.append(struct.pack("<I", len(data)) + data)
    if input_ids is not None:
        request.inputs.add(name=INPUT_IDS.name, datatype="INT32", shape=(1, len(input_ids)))
        request.raw_input_contents.append(pack_ids(input_ids))
    for name, value in options.items():
        if value is not None:
            set_parameter(request.parameters[name], name, value)
    return request


def parse_response(response: service_pb2.ModelStreamInferResponse) -> Chunk:
    """Return the chunk of one stream response; raises the typed error that its in-band message names."""
    if response.error_message:
        raise typed_error(response.error_message)
    infer_response = response.infer_response
    outputs = {
        output.name: unpack(output.datatype, raw)
        for output, raw in zip(infer_response.outputs, infer_response.raw_output_contents, strict=True)
    }
    statistics = {tensor.name: outputs[tensor.name][0] for tensor in STATISTICS if tensor.name in outputs}
    return Chunk(
        text=outputs.get(TEXT_OUTPUT.name, ("",))[0],
        token_ids=outputs.get(TOKEN_IDS.name, ()),
        finish_reason=outputs.get(FINISH_REASON.name, ("",))[0] or None,
        statistics=statistics or None,
        outputs=outputs,
        version=infer_response.model_version,
    )


def is_final(response: service_pb2.ModelStreamInferResponse) -> bool:
    """True for the last response of a request. An error is always the last."""
    final = response.infer_response.parameters.get("triton_final_response")
    return bool(response.error_message) or (final is not None and final.bool_param)


def typed_error(message: str) -> TritonForgeError:
    """Return the error that `message` stands for: by its `CODE: text`, else by Triton's wording, else INTERNAL."""
    coded = _CODE.search(message)
    if coded:
        return _ERRORS[coded.group(1)](message[coded.end() :])
    for error, wordings in _TRITON_WORDING:
        if any(wording in message for wording in wordings):
            return error(message)
    return TritonForgeError(message)


def rpc_error(error: grpc.RpcError) -> TritonForgeError:
    """Return the typed error of a call that failed as a whole: no connection, a deadline, a dead server."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNKNOWN:
        return typed_error(details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        details = "no final answer within the timeout"
    return _GRPC_CODES.get(code, TritonForgeError)(details)


def connect(url: str) -> grpc.Channel:
    """Return a channel to the gRPC endpoint `host:port`; a leading `grpc://` is accepted. Does not connect yet."""
    target = url.removeprefix("grpc://")
    local = is_loopback(target)
    return grpc.insecure_channel(target, options=(*CHANNEL_OPTIONS, *(NO_PROXY if local else ())))


def stream(
    channel_or_url: grpc.Channel | str, request: service_pb2.ModelInferRequest, timeout: float | None = None
) -> Iterator[Chunk]:
    """Send `request` and yield its chunks as they come, the last one with the finish reason; `timeout` in seconds.

    Closing the generator early, or an exception in it, ends the call and frees what the request holds in the decoder:
    a closed call reaches the decoder itself, but not through an ensemble, so there the request is cancelled by its id
    as well. Raises the typed error of the in-band message or of the failed call.
    """
    with _channel(channel_or_url) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter((request,)), timeout=timeout)
        ended, version = False, request.model_version
        try:
            for response in call:
                ended, version = is_final(response), response.infer_response.model_version
                yield parse_response(response)
                if ended:
                    return
            ended = True
            raise TritonForgeError(f"the stream of request {request.id} ended without a final answer")
        except grpc.RpcError as error:
            ended = error.code() is grpc.StatusCode.UNAVAILABLE
            raise rpc_error(error) from None
        finally:
            if not ended:
                _abandon(channel, call.cancel, request, version)


def cancel(
    channel_or_url: grpc.Channel | str, request_id: str, timeout: float = CANCEL_TIMEOUT_S, *, version: str = ""
) -> None:
    """Ask the decoder to cancel the request with this id; its stream then ends with the reason `cancelled`.

    `version` is that of the stream's chunks; the stable release's decoder is asked without it. Returns once the decoder
    has answered. Raises NotFound when it knows no such request (any more).
    """
    request = infer_request(DECODER, input_ids=(), cancel=request_id)
    request.model_version = version
    for _ in stream(channel_or_url, request, timeout):
        pass


def generate(
    channel_or_url: grpc.Channel | str, request: service_pb2.ModelInferRequest, timeout: float | None = None
) -> Chunk:
    """Return the whole answer to `request` as one chunk, whether it is streamed or not."""
    chunks = list(stream(channel_or_url, request, timeout))
    ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    last, text = chunks[-1], "".join(chunk.text for chunk in chunks)
    return Chunk(text, ids, last.finish_reason, last.statistics, version=last.version)


def _abandon(
    channel: grpc.Channel, close_call: Callable[[], bool], request: service_pb2.ModelInferRequest, version: str
) -> None:
    close_call()
    if request.model_name != DECODER:
        with contextlib.suppress(TritonForgeError):  # it may have finished meanwhile, or the server is gone
            cancel(channel, request.id, version=version)


@contextlib.contextmanager
def _channel(channel_or_url: grpc.Channel | str) -> Iterator[grpc.Channel]:
    if not isinstance(channel_or_url, str):
        yield channel_or_url
        return
    with connect(channel_or_url) as channel:
        yield channel

"""Requests that no client library would make, raw on the wire: each is answered with an error, and serving goes on.

Wrong if it failed: one such request would hang, take the server down, or keep KV blocks for ever.
"""

import random
import struct
from collections.abc import Callable

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tritonforge.client import infer_request, is_final
from tritonforge.contract import SERVED_MODELS

pytestmark = pytest.mark.server

DEADLINE_S = 30.0
"""An answer takes milliseconds; this is only there to tell a hang from a slow machine."""
MESSAGE_BOUND = 1000
DATATYPES = ("BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES", "BF16", "", "INT33")
SHAPES = (
    (),
    (0,),
    (1,),
    (1, 0),
    (1, 1),
    (1, 1, 1),
    (2, 1),
    (64, 1),
    (1, 3),
    (1, -1),
    (-1, 1),
    (1, 2**31),
    (2**31, 2**31),
)
SHAPES += ((1, 2**40), (2**62, 4), (-2, 1), (2**63 - 1,), (65, 1))
NAMES = ("text_input", "input_ids", "prompt_truncated_tokens", "", "text_output", "x" * 300, "é")
CONTENTS = (b"", b"\x00", struct.pack("<I", 2**32 - 1) + b"a", b"\xff" * 7, b"\x05\x00\x00\x00ab")
CONTENTS += (
    b"\x02\x00\x00\x00\xff\xfe",
    struct.pack("<3i", -1, 2**31 - 1, 5),
    struct.pack("<i", 49152),
    b"\x00" * 4096,
)
TEXTS = ("", "x", "[", "{", "é\x00", "[" * 5000, '["a"]', "nan", "-1", "9" * 400, "x" * 20_000)
PARAMETERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "n",
    "regex",
    "json_schema",
    "messages",
    "tools",
    "cancel",
)
PARAMETERS += (
    "logit_bias",
    "logprobs",
    "min_p",
    "truncate",
    "chat",
    "tenant",
    "",
    "é",
    "y" * 300,
    "triton_x",
    "priority",
)
PARAMETERS += ("timeout", "sequence_id", "sequence_start", "sequence_end", "binary_data_output", "priority_class")
RESERVED = ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "binary_data_output")
"""Parameters that Triton's gRPC endpoint takes for itself: they reach no model."""

Damage = Callable[[random.Random, pb.ModelInferRequest], None]


def other_datatype(rng: random.Random, request: pb.ModelInferRequest) -> None:
    known = request.inputs[0].datatype
    request.inputs[0].datatype = rng.choice([name for name in DATATYPES if name != known])


def other_shape(rng: random.Random, request: pb.ModelInferRequest) -> None:
    known = tuple(request.inputs[0].shape)
    request.inputs[0].shape[:] = rng.choice([shape for shape in SHAPES if shape != known])


def other_bytes(rng: random.Random, request: pb.ModelInferRequest) -> None:
    """Of a wrong length, or no UTF-8, or no token ids."""
    request.raw_input_contents[0] = rng.choice(CONTENTS)


def no_input(rng: random.Random, request: pb.ModelInferRequest) -> None:
    del request.inputs[:]
    if rng.random() < 0.5:
        del request.raw_input_contents[:]


def no_bytes(rng: random.Random, request: pb.ModelInferRequest) -> None:
    del request.raw_input_contents[:]


def input_twice(rng: random.Random, request: pb.ModelInferRequest) -> None:
    request.inputs.append(request.inputs[0])
    request.raw_input_contents.append(request.raw_input_contents[0])


def foreign_input(rng: random.Random, request: pb.ModelInferRequest) -> None:
    name = rng.choice([name for name in NAMES if name != request.inputs[0].name and "prompt" not in name])
    request.inputs.add(name=name, datatype="INT32", shape=(1, 1))
    request.raw_input_contents.append(struct.pack("<i", 7))


def typed_contents_too(rng: random.Random, request: pb.ModelInferRequest) -> None:
    request.inputs[0].contents.int_contents.append(1)


def bad_parameter(rng: random.Random, request: pb.ModelInferRequest) -> None:
    """An unknown option, or one whose value has a wrong type or breaks its rule."""
    name = rng.choice([name for name in PARAMETERS if name not in RESERVED])
    parameter = request.parameters[name]
    kind = rng.randrange(6)
    if kind == 0:
        parameter.bool_param = True
        request.parameters["max_tokens"].bool_param = False
    elif kind == 1:
        parameter.int64_param = rng.choice((-(2**63), -1, 2**63 - 1))
    elif kind == 2:
        parameter.double_param = rng.choice((float("nan"), float("inf"), -1e308))
    elif kind == 3:
        parameter.string_param = rng.choice(TEXTS)
        request.parameters["top_p"].string_param = "1"
    elif kind == 4:
        parameter.uint64_param = 2**64 - 1
    # kind 5: a parameter without a value


def reserved_parameter(rng: random.Random, request: pb.ModelInferRequest) -> None:
    request.parameters[rng.choice(RESERVED)].string_param = rng.choice(TEXTS)
    request.parameters["top_p"].double_param = 2.0


def other_model(rng: random.Random, request: pb.ModelInferRequest) -> None:
    if rng.random() < 0.5:
        request.model_name = rng.choice(("", "nobody", "../decoder", "llm\x00", "x" * 300))
    else:
        request.model_version = rng.choice(("2", "x", "-1", "9" * 30))


def output_of_nobody(rng: random.Random, request: pb.ModelInferRequest) -> None:
    request.outputs.add(name=rng.choice(("nothing", "", "input_ids " * 20)))


DAMAGES: tuple[Damage, ...] = (
    other_datatype,
    other_shape,
    other_bytes,
    no_input,
    no_bytes,
    input_twice,
    foreign_input,
    typed_contents_too,
    bad_parameter,
    reserved_parameter,
    other_model,
    output_of_nobody,
)


def good_request(model: str) -> pb.ModelInferRequest:
    """One that would be answered."""
    if model == "decoder":
        return infer_request(model, input_ids=[504, 3575, 282], max_tokens=2)
    return infer_request(model, text="Hi", max_tokens=2)


def answer(stub: service_pb2_grpc.GRPCInferenceServiceStub, request: pb.ModelInferRequest, *, streamed: bool) -> str:
    """The error that `request` is answered with, "" when it is served. Fails when there is no answer."""
    try:
        if not streamed:
            stub.ModelInfer(request, timeout=DEADLINE_S)
            return ""
        responses = []
        for response in stub.ModelStreamInfer(iter((request,)), timeout=DEADLINE_S):
            responses.append(response)
            if is_final(response):
                break
        assert responses, "the stream ended without an answer"
        return responses[-1].error_message
    except grpc.RpcError as error:
        assert error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE), error
        return error.details() or str(error.code())


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_request_gets_an_error_and_leaves_the_server_serving(channel, ask, await_all_free, damage):
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    rng = random.Random(damage.__name__)
    served = []
    for _ in range(30):
        request = good_request(rng.choice(sorted(SERVED_MODELS)))
        damage(rng, request)
        error = answer(stub, request, streamed=rng.random() < 0.5)
        assert len(error) < MESSAGE_BOUND, f"{len(error)} characters: {error[:200]}"
        if not error:
            served.append(str(request)[:500])
    assert not served, f"{len(served)} were served as if nothing were wrong, the first: {served[0]}"
    assert ask(max_tokens=2).finish_reason == "length"
    await_all_free()

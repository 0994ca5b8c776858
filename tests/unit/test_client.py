"""The client's wire form and its errors, without a server."""

import struct

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tritonforge import client
from tritonforge.errors import Cancelled, InvalidRequest, NotFound, Overloaded, TritonForgeError


def response(
    final: bool = False, error: str = "", **outputs: tuple[str, bytes]
) -> service_pb2.ModelStreamInferResponse:
    message = service_pb2.ModelStreamInferResponse(error_message=error)
    for name, (datatype, raw) in outputs.items():
        message.infer_response.outputs.add(name=name, datatype=datatype, shape=(1, 1))
        message.infer_response.raw_output_contents.append(raw)
    message.infer_response.parameters["triton_final_response"].bool_param = final
    return message


def string(text: str) -> tuple[str, bytes]:
    return "BYTES", struct.pack("<I", len(text.encode())) + text.encode()


def test_options_keep_their_types_on_the_wire():
    request = client.infer_request(
        "llm", text="hé", request_id="r1", stream=True, max_tokens=3, temperature=0.5, stop=["a", "é"], seed=None
    )
    kinds = {name: parameter.WhichOneof("parameter_choice") for name, parameter in request.parameters.items()}
    assert kinds == {
        "stream": "bool_param", "max_tokens": "int64_param", "temperature": "double_param", "stop": "string_param"
    }  # fmt: skip
    assert request.parameters["stop"].string_param == '["a", "é"]'
    assert request.id == "r1"
    assert list(request.inputs[0].shape) == [1, 1]
    assert request.raw_input_contents[0] == b"\x03\x00\x00\x00h\xc3\xa9"


def test_a_request_without_an_id_gets_one_so_that_it_can_be_cancelled():
    first, second = client.infer_request("llm", text=""), client.infer_request("llm", text="")
    assert first.id and second.id and first.id != second.id


def test_input_ids_are_32_bit_and_may_be_empty():
    request = client.infer_request("decoder", input_ids=[1, -2])
    assert list(request.inputs[0].shape) == [1, 2]
    assert request.raw_input_contents[0] == struct.pack("<2i", 1, -2)
    assert list(client.infer_request("decoder", input_ids=()).inputs[0].shape) == [1, 0]


@pytest.mark.parametrize(("ids", "value"), [([2**31], "2147483648"), ([1, "x"], "'x'"), ([None], "None")])
def test_bad_input_ids_are_refused_with_their_value(ids, value):
    with pytest.raises(InvalidRequest, match=f"input_ids .* got {value}"):
        client.infer_request("decoder", input_ids=ids)


@pytest.mark.parametrize("value", [2**63, b"bytes", {"a": 1}])
def test_an_option_without_a_wire_form_is_refused(value):
    with pytest.raises(InvalidRequest, match="seed must be"):
        client.infer_request("llm", text="", seed=value)


def test_the_last_response_carries_reason_and_statistics():
    ids = struct.pack("<2i", 5, 7)
    message = response(
        final=True,
        text_output=string("né"),
        token_ids=("INT32", ids),
        finish_reason=string("length"),
        prompt_tokens=("INT64", struct.pack("<q", 2**40)),
    )
    chunk = client.parse_response(message)
    assert chunk == client.Chunk("né", (5, 7), "length", {"prompt_tokens": 2**40})
    assert client.is_final(message)


def test_an_earlier_response_has_no_reason_and_no_statistics():
    message = response(text_output=string(""), token_ids=("INT32", struct.pack("<i", 5)))
    assert client.parse_response(message) == client.Chunk("", (5,), None, None)
    assert not client.is_final(message)


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        ("INVALID_ARGUMENT: top_p must be in (0, 1], got 2", InvalidRequest, "top_p must be in (0, 1], got 2"),
        ("in ensemble 'llm', UNAVAILABLE: the queue is full", Overloaded, "the queue is full"),
        ("CANCELLED: by its id", Cancelled, "by its id"),
        ("INTERNAL: a step failed", TritonForgeError, "a step failed"),
        ("Request for unknown model: 'x' is not found", NotFound, "unknown model"),
        ("unexpected inference input 'x' for model 'llm'", InvalidRequest, "unexpected inference input"),
        ("Server is stopping, scheduler for model has stopped accepting", Overloaded, "is stopping"),
        ("Stub process 'decoder_0_0' is not healthy.", Overloaded, "not healthy"),
        ("something else", TritonForgeError, "something else"),
    ],
)
def test_messages_become_typed_errors(message, kind, text):
    error = client.typed_error(message)
    assert type(error) is kind
    assert text in str(error) and str(error).count(f"{error.code}: ") == 1
    with pytest.raises(kind):
        client.parse_response(response(error=message))
    assert client.is_final(response(error=message))


def test_no_server_is_a_typed_error():
    with pytest.raises(Overloaded, match="Connection refused"):
        next(client.stream("127.0.0.1:1", client.infer_request("llm", text="x"), timeout=10))


class FakeCall:
    """Yields prepared responses, then fails or ends."""

    def __init__(self, responses, error=None):
        self._responses, self._error = responses, error
        self.cancelled = False

    def __iter__(self):
        yield from self._responses
        if self._error:
            raise self._error

    def cancel(self):
        self.cancelled = True


@pytest.fixture
def calls(monkeypatch):
    """Replaces the gRPC stub: each call takes the next FakeCall and notes its request."""
    prepared, made = [], []

    class Stub:
        def __init__(self, channel):
            pass

        def ModelStreamInfer(self, requests, timeout=None):
            made.append(next(requests))
            return prepared.pop(0)

    monkeypatch.setattr(client.service_pb2_grpc, "GRPCInferenceServiceStub", Stub)
    return prepared, made


class Channel(grpc.Channel):
    """Stands for a channel; nothing of it is used."""

    subscribe = unsubscribe = unary_unary = unary_stream = stream_unary = stream_stream = close = None
    __enter__ = __exit__ = None


def chunk_response(text, final=False):
    outputs = {"text_output": string(text), "token_ids": ("INT32", b"")}
    return response(final, **outputs, **({"finish_reason": string("stop")} if final else {}))


def test_a_finished_stream_is_not_cancelled(calls):
    prepared, made = calls
    call = FakeCall([chunk_response("a"), chunk_response("b", final=True)])
    prepared.append(call)
    assert [c.text for c in client.stream(Channel(), client.infer_request("llm", text="x"))] == ["a", "b"]
    assert not call.cancelled and len(made) == 1


def test_closing_a_stream_of_the_ensemble_closes_the_call_and_cancels_by_id(calls):
    prepared, made = calls
    call = FakeCall([chunk_response("a"), chunk_response("b")])
    prepared += [call, FakeCall([chunk_response("", final=True)])]
    answer = client.stream(Channel(), client.infer_request("llm", text="x", request_id="r1"))
    next(answer)
    answer.close()
    assert call.cancelled
    assert made[1].model_name == "decoder" and made[1].parameters["cancel"].string_param == "r1"


def test_closing_a_stream_of_the_decoder_only_closes_the_call(calls):
    prepared, made = calls
    call = FakeCall([chunk_response("a"), chunk_response("b")])
    prepared.append(call)
    answer = client.stream(Channel(), client.infer_request("decoder", input_ids=[1]))
    next(answer)
    answer.close()
    assert call.cancelled and len(made) == 1


def test_an_answer_without_an_end_is_an_error(calls):
    calls[0].append(FakeCall([chunk_response("a")]))
    with pytest.raises(TritonForgeError, match="without a final answer"):
        list(client.stream(Channel(), client.infer_request("decoder", input_ids=[1])))


def test_generate_joins_the_chunks(calls):
    calls[0].append(FakeCall([chunk_response("a"), chunk_response("b", final=True)]))
    answer = client.generate(Channel(), client.infer_request("llm", text="x"))
    assert (answer.text, answer.finish_reason) == ("ab", "stop")


def test_text_that_has_no_utf_8_form_is_refused_by_name():
    with pytest.raises(InvalidRequest, match="text_input must be UTF-8"):
        client.infer_request("llm", text="caf\udce9")

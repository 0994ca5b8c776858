"""Values of requests and responses in their wire form: texts, token ids, options and output tensors.

The client library is its only caller. Nothing is checked here that the server checks.
"""

import json
import struct
from collections.abc import Iterator, Sequence

from tritonclient.grpc import service_pb2

from tritonforge.contract import TEXT_INPUT
from tritonforge.errors import InvalidRequest


def encode_text(text: str) -> bytes:
    """UTF-8 of a text. Raises InvalidRequest for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        rule = f"must be UTF-8 text; it has an invalid character at position {error.start}"
        raise InvalidRequest(f"{TEXT_INPUT.name} {rule}") from None


def set_parameter(parameter: service_pb2.InferParameter, name: str, value: object) -> None:
    """Set an option's value. Raises InvalidRequest for one that has no wire form."""
    if isinstance(value, list | tuple):
        value = json.dumps(value, ensure_ascii=False)
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    try:
        setattr(parameter, kinds[type(value)], value)
    except (KeyError, ValueError) as error:
        rule = "must be a bool, a 64-bit int, a float, a string or a list"
        raise InvalidRequest(f"{name} {rule}, got {value!r}") from error


def pack_ids(input_ids: Sequence[int]) -> bytes:
    """The bytes of an INT32 tensor. Raises InvalidRequest naming what is no such integer."""
    try:
        return struct.pack(f"<{len(input_ids)}i", *input_ids)
    except struct.error as error:
        bad = next(i for i in input_ids if not isinstance(i, int) or not -(2**31) <= i < 2**31)
        raise InvalidRequest(f"input_ids must be 32-bit integers, got {bad!r}") from error


def unpack(datatype: str, raw: bytes) -> tuple:
    """The elements of a tensor."""
    if datatype == "BYTES":
        return tuple(_unpack_strings(raw))
    code, size = {"INT32": ("i", 4), "INT64": ("q", 8), "FP32": ("f", 4)}[datatype]
    return struct.unpack(f"<{len(raw) // size}{code}", raw)


def _unpack_strings(raw: bytes) -> Iterator[str]:
    """Texts of a BYTES tensor: each is its length in 4 bytes, then its UTF-8."""
    position = 0
    while position < len(raw):
        start = position + 4
        position = start + struct.unpack_from("<I", raw, position)[0]
        yield raw[start:position].decode()

"""What a client is told when a request is not answered: OpenAI's error shape, its HTTP status and headers.

Every refusal of the edge is an ApiError; errors of the served models become one here. No text of an internal failure
reaches a client.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritonforge.errors import (
    STATUS,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    TritonForgeError,
)
from tritonforge.options import OPTIONS

RETRY_S = 1
"""Retry-After of a 503 whose cause names no time."""

_RETRY = re.compile(r"retry in about (\d+) s")
_TOO_LONG = re.compile(r"the prompt must be shorter than|max_model_len \d+ minus|the last turn of the chat must fit")
_PLACE = re.compile(r"(?:messages|tools)(?:\[\d+\][\w.\[\]]*)?")
_OPENAI_NAMES = {
    "json_schema": "response_format",
    "json_object": "response_format",
    "grammar": "tools",
    "top_ids": "top_logprobs",
}
"""Options of the models that an OpenAI client knows by another name."""


@dataclass(eq=False)  # not frozen: Python sets the traceback of an exception
class ApiError(Exception):
    """A refusal: `status` is the HTTP status, the others are OpenAI's fields; `param` names the field at fault."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    type: str = "invalid_request_error"
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON body, as https://platform.openai.com/docs/guides/error-codes has it."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """400: the request breaks a rule of the API."""
    return ApiError(400, message, code, param)


def unsupported(param: str, why: str) -> ApiError:
    """400: a documented field that is refused by name."""
    return ApiError(400, f"Unsupported parameter: '{param}' is not supported: {why}", "unsupported_parameter", param)


def unavailable(message: str, retry_s: int = RETRY_S) -> ApiError:
    """503: nobody can answer now."""
    return ApiError(503, message, "unavailable", type="server_error", headers={"Retry-After": str(retry_s)})


def internal() -> ApiError:
    """500: a failure whose text stays in the log."""
    return ApiError(500, "The server had an error while processing the request.", "internal_error", type="server_error")


def unauthorized(*, given: bool) -> ApiError:
    """401: `given` says whether there was a key at all."""
    message = "Incorrect API key provided." if given else "You didn't provide an API key: send it as a Bearer token."
    told = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, "invalid_api_key", type="authentication_error", headers=told)


def revoked() -> ApiError:
    """401: the key was revoked while its request was answered."""
    return ApiError(401, "The API key was revoked.", "invalid_api_key", type="authentication_error")


def of_model_error(error: TritonForgeError) -> ApiError:
    """What a client is told of an error that the served models, or the way to them, raised."""
    text = str(error).partition(": ")[2]
    if isinstance(error, InvalidRequest):
        if _TOO_LONG.search(text):
            return ApiError(400, text, "context_length_exceeded", _param(text))
        return ApiError(422, text, "invalid_value", _param(text))
    if isinstance(error, Overloaded):
        told = _RETRY.search(text)
        return unavailable("The model cannot take the request now.", int(told.group(1)) if told else RETRY_S)
    if isinstance(error, DeadlineExceeded):
        return ApiError(STATUS[error.code].http, "The answer was not complete in time.", "timeout", type="server_error")
    if isinstance(error, Cancelled):
        return unavailable("The answer was cancelled by the server.")
    if isinstance(error, NotFound):
        return unavailable("The model is not loaded.")
    return internal()


def _param(text: str) -> str | None:
    """The field that a model's message names first."""
    place = _PLACE.match(text)
    if place:
        return place.group()
    name = text.partition(" ")[0]
    return _OPENAI_NAMES.get(name, name if name in OPTIONS else None)

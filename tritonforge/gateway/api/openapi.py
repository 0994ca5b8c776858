"""The OpenAPI document of the edge, made from the request models of schemas.py."""

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tritonforge import __version__
from tritonforge.gateway.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)

_POSTS: dict[str, tuple[type[BaseModel], str, bool]] = {
    "/v1/chat/completions": (ChatRequest, "An answer to a chat", True),
    "/v1/completions": (CompletionRequest, "The continuation of a text", True),
    "/v1/embeddings": (EmbeddingRequest, "Embeddings: no model makes any yet", False),
    "/tokenize": (TokenizeRequest, "The token ids of a text or a chat", False),
    "/detokenize": (DetokenizeRequest, "The text of token ids", False),
}
_ERRORS = {
    "400": "The request breaks a rule of the API, or sets a field that is not supported",
    "401": "No valid API key",
    "403": "The key may not use the model",
    "404": "No such model",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "422": "The model cannot follow the request",
    "429": "A limit of the tenant is reached",
    "500": "The model failed",
    "503": "Nobody can answer now",
    "504": "The answer was not complete in time",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_EVENT = {
    "type": "object",
    "description": "One server-sent event: a chunk of the answer as JSON, an error, or [DONE] at the end",
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
}
_REF = "#/components/schemas/"


@cache
def document() -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    models = [(model, "validation") for model, _, _ in _POSTS.values()]
    _, schemas = models_json_schema(models, ref_template=_REF + "{model}")
    paths: dict[str, Any] = {path: {"post": _post(*told)} for path, told in _POSTS.items()}
    paths["/v1/models"] = {"get": _get("The models that the key may use", ("401",))}
    parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{model}"] = {"get": _get("One model", ("401", "403", "404")) | {"parameters": [parameter]}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "TritonForge gateway", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"] | {"Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _post(model: type[BaseModel], summary: str, streams: bool) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": _EVENT}
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": _REF + model.__name__}}}}
    return {"summary": summary, "requestBody": body, "responses": _responses(content, tuple(_ERRORS))}


def _get(summary: str, errors: tuple[str, ...]) -> dict[str, Any]:
    return {"summary": summary, "responses": _responses({"application/json": {"schema": {"type": "object"}}}, errors)}


def _responses(content: dict[str, Any], errors: tuple[str, ...]) -> dict[str, Any]:
    shape = {"application/json": {"schema": {"$ref": _REF + "Error"}}}
    told = {status: {"description": _ERRORS[status], "content": shape} for status in errors}
    return {"200": {"description": "The answer", "content": content}, **told}

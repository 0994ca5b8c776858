"""The ASGI application of the edge: its paths, and what every path has in common."""

import contextlib
import hmac
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route as Path

from tritonforge.errors import TritonForgeError
from tritonforge.gateway.api.bodies import read
from tritonforge.gateway.api.errors import ApiError, internal, invalid, of_model_error
from tritonforge.gateway.api.openapi import document
from tritonforge.gateway.api.schemas import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from tritonforge.gateway.edge import Edge
from tritonforge.gateway.endpoint import endpoints
from tritonforge.gateway.exchange import Exchange
from tritonforge.gateway.ids import new_request_id
from tritonforge.gateway.responses import ClientGone, read_body
from tritonforge.gateway.routing.router import ModelInfo
from tritonforge.gateway.work import of_tokenize

log = logging.getLogger(__name__)


class Small:
    """The paths that answer at once: models, tokens, health, the OpenAPI document."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def models(self, request: Request) -> Response:
        """GET /v1/models: those that the key may use."""
        exchange = self._enter(request, "models")
        allowed = exchange.tenant.models
        found = [info for info in self._edge.router.models() if allowed is None or info.name in allowed]
        return _json({"object": "list", "data": [_model(info) for info in found]}, exchange)

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        exchange = self._enter(request, "models")
        return _json(_model(exchange.find(request.path_params["model"]).info), exchange)

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings: no model of a release makes any yet."""
        exchange = self._enter(request, "embeddings")
        asked = read(EmbeddingRequest, await self._body(request))
        exchange.find(asked.model)
        raise ApiError(404, f"The model {asked.model!r} makes no embeddings.", "model_not_found", "model")

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the token ids of a text or a chat."""
        exchange = await self._enter_counted(request, "tokenize")
        asked = read(TokenizeRequest, await self._body(request))
        route = exchange.find(asked.model)
        tokens = route.info.tokens
        if asked.return_token_strs and tokens is None:
            raise invalid("return_token_strs", "return_token_strs needs the release's tokenizer, which is not here")
        try:
            prompt = await exchange.tokenize(of_tokenize(asked, takes_tools=route.info.takes_tools), route)
        except TritonForgeError as error:
            raise of_model_error(error) from None
        texts = None
        if asked.return_token_strs and tokens is not None:
            texts = [tokens.bytes_of(one).decode(errors="replace") for one in prompt.token_ids]
        told = {"count": len(prompt.token_ids), "max_model_len": route.info.max_model_len}
        return _json(told | {"tokens": list(prompt.token_ids), "token_strs": texts}, exchange)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of token ids, without special tokens."""
        exchange = await self._enter_counted(request, "detokenize")
        asked = read(DetokenizeRequest, await self._body(request))
        tokens = exchange.find(asked.model).info.tokens
        if tokens is None:
            raise invalid("tokens", "detokenize needs the release's tokenizer, which this gateway was not given")
        for index, token_id in enumerate(asked.tokens):
            if token_id >= tokens.size:
                raise invalid(f"tokens[{index}]", f"tokens must be in [0, {tokens.size - 1}], got {token_id}")
        return _json({"prompt": tokens.decode(asked.tokens)}, exchange)

    async def live(self, request: Request) -> Response:
        """GET /health/live: the edge itself runs."""
        return PlainTextResponse("ok\n")

    async def ready(self, request: Request) -> Response:
        """GET /health/ready: some model can answer."""
        ready = await self._edge.router.ready()
        return PlainTextResponse("ok\n" if ready else "no model is ready\n", 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus, with the token of [metrics]; nobody else: behind a proxy everybody is local."""
        token = self._edge.config.records.metrics.token
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token is None or not hmac.compare_digest(given.encode(), token.encode()):
            raise ApiError(
                403, "The metrics need the token of [metrics], or their own port.", "forbidden", type="permission_error"
            )
        return Response(self._edge.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        return JSONResponse(document())

    def _enter(self, request: Request, endpoint: str) -> Exchange:
        """An exchange of somebody who has a key; nothing is counted or recorded."""
        exchange = Exchange(self._edge, endpoint, request.headers)
        request.state.told = exchange.headers
        exchange.authenticate(request.headers.get("authorization", ""))
        self._edge.open.discard(exchange)  # it is over before anybody could revoke its key
        return exchange

    async def _enter_counted(self, request: Request, endpoint: str) -> Exchange:
        """The same for what costs some work: it counts as one of the tenant's requests. Raises ApiError 429."""
        exchange = self._enter(request, endpoint)
        exchange.headers |= await self._edge.quota.count_request(exchange.tenant)
        return exchange

    async def _body(self, request: Request) -> bytes:
        limits = self._edge.config.edge
        return await read_body(request.scope, request.receive, limits.max_body_bytes, limits.body_timeout_s)


def _json(content: Any, exchange: Exchange) -> Response:
    return JSONResponse(content, headers=exchange.headers)


def _model(info: ModelInfo) -> dict[str, Any]:
    told = {"id": info.name, "object": "model", "created": info.created, "owned_by": "tritonforge"}
    return told | {"max_model_len": info.max_model_len, "system_fingerprint": info.fingerprint}


def _error(request: Request, error: ApiError) -> Response:
    """Every answer has an id, also that of a path where nobody has asked who it is."""
    told = getattr(request.state, "told", None) or {"x-request-id": new_request_id()}
    return JSONResponse(error.body(), error.status, headers=told | dict(error.headers))


def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(request, error)


def _on_http_error(request: Request, error: Exception) -> Response:
    """An unknown path, or a method that a path does not have."""
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    message = f"{request.method} of this path: {error.detail}."
    return _error(request, ApiError(error.status_code, message, code, headers=error.headers or {}))


def _on_failure(request: Request, error: Exception) -> Response:
    return _error(request, internal())


def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


def make_app(edge: Edge) -> Starlette:
    """The application; it closes the edge when it ends."""
    small = Small(edge)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with edge.running():
            yield

    paths = [Path(path, app, methods=["POST"]) for path, app in endpoints(edge).items()]
    paths += [
        Path("/v1/models", small.models),
        Path("/v1/models/{model:path}", small.model),
        Path("/v1/embeddings", small.embeddings, methods=["POST"]),
        Path("/tokenize", small.tokenize, methods=["POST"]),
        Path("/detokenize", small.detokenize, methods=["POST"]),
        Path("/health/live", small.live),
        Path("/health/ready", small.ready),
        Path("/metrics", small.metrics),
        Path("/openapi.json", small.openapi),
    ]
    handlers: dict[Any, Any] = {
        ApiError: _on_api_error,
        HTTPException: _on_http_error,
        ClientGone: _on_gone,
        Exception: _on_failure,
    }
    return Starlette(routes=paths, exception_handlers=handlers, lifespan=lifespan)

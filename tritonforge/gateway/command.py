"""The command `tritonforge gateway`: puts the edge together and serves it with uvicorn. Called by the command line."""

import argparse
import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tritonforge.errors import InvalidRequest, SetupError
from tritonforge.gateway.accounting.edge_metrics import EdgeMetrics
from tritonforge.gateway.accounting.keepers import keep_records, trace
from tritonforge.gateway.accounting.metrics_server import metrics_server
from tritonforge.gateway.api.formats import FormatHook
from tritonforge.gateway.app import make_app
from tritonforge.gateway.config import GatewayConfig
from tritonforge.gateway.edge import Edge
from tritonforge.gateway.filtering.filters import FilterHook
from tritonforge.gateway.limits.keys import KeyStore
from tritonforge.gateway.limits.leases import open_leases
from tritonforge.gateway.limits.quota import Quota, open_storage
from tritonforge.gateway.responses import ABORT
from tritonforge.gateway.routing.alias_router import AliasRouter, Models
from tritonforge.gateway.routing.config import RoutingConfig
from tritonforge.gateway.routing.router import ModelInfo, Router
from tritonforge.gateway.tokens import ReleaseTokens
from tritonforge.launch.ports import is_loopback
from tritonforge.observation.observation import Observation
from tritonforge.release import Release

MODEL_WITHOUT_RELEASE = "llm"
KEEP_ALIVE_S = 75
"""Longer than load balancers keep an idle connection: it is theirs to close it."""
UNREAD_S = 60
"""The kernel ends a connection whose client has taken nothing of what was written for so long."""


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with one more ASGI extension: to close a connection without waiting for its buffers."""

    def connection_made(self, transport: Any) -> None:
        """Give every request of this connection the extension."""
        super().connection_made(transport)
        app = self.app

        async def with_abort(scope: Any, receive: Any, send: Any) -> None:
            scope["extensions"] = {**scope.get("extensions", {}), ABORT: transport.abort}
            await app(scope, receive, send)

        self.app = with_abort


def gateway(arguments: argparse.Namespace) -> int:
    """Serve the API until SIGINT or SIGTERM; with a release and no Triton, serve that as well."""
    _check(arguments)
    quiet_http_client()
    config = GatewayConfig.read(arguments.config)
    given = arguments.release is not None or arguments.triton is not None
    if given == bool(config.routing.models):
        raise InvalidRequest("give --release DIR or --triton URL, or [models] in the configuration, and not both")
    keys = _keys(arguments)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(arguments.address, arguments.port))
        if given:
            urls = arguments.triton or [stack.enter_context(served(arguments.release))]
            info = model_info(arguments.release, arguments.model)
            models: Models = {info.name: (info, urls)}
        else:
            models = models_of(config.routing)
        asyncio.run(_serve(config, keys, models, listener, arguments))
    return 0


def quiet_http_client() -> None:
    """No line of the log for each request that is sent to others: what fails is told by who asked."""
    logging.getLogger("httpx2").setLevel(logging.WARNING)


def _check(arguments: argparse.Namespace) -> None:
    """Raise InvalidRequest for a number that nothing below can take."""
    if not 0 <= arguments.drain_timeout < math.inf:
        raise InvalidRequest(f"--drain-timeout must be a number of seconds of 0 or more, got {arguments.drain_timeout}")
    for name in ("port", "metrics_port"):
        port = getattr(arguments, name)
        if port is not None and not 0 <= port <= 65535:
            raise InvalidRequest(f"--{name.replace('_', '-')} must be in [0, 65535], got {port}")
    Observation(otlp_endpoint=arguments.otlp_endpoint or None, trace_ratio=arguments.trace_ratio)


def models_of(config: RoutingConfig) -> Models:
    """The models of [models]."""
    return {
        name: (model_info(Path(table.release) if table.release else None, name), table.replicas)
        for name, table in config.models.items()
    }


def model_info(release: Path | None, name: str | None) -> ModelInfo:
    """What the release's folder says of its model."""
    if release is None:
        return ModelInfo(name or MODEL_WITHOUT_RELEASE)
    opened = Release.open(release)
    tokens = ReleaseTokens(opened.model_repository / "tokenizer" / "1")
    length = opened.manifest.get("recipe", {}).get("limits", {}).get("max_model_len")
    return ModelInfo(name or opened.name, length, f"fp_{opened.digest[:16]}", tokens, tokens.takes_tools)


async def _serve(
    config: GatewayConfig,
    keys: KeyStore | None,
    models: Models,
    listener: socket.socket,
    arguments: argparse.Namespace,
) -> None:
    metrics = EdgeMetrics()
    edge = make_edge(config, keys, AliasRouter(config.routing, models, metrics), metrics)
    keep_records(edge)
    trace(edge, arguments.otlp_endpoint or None, arguments.trace_ratio)
    with metrics_server(metrics, arguments.metrics_address, arguments.metrics_port) as metrics_url:
        host, port = listener.getsockname()[:2]
        print(f"gateway of {', '.join(models)}\n  API      http://{host}:{port}/v1")
        print(f"  metrics  {metrics_url}" if metrics_url else "", end="\n" if metrics_url else "")
        print("Ctrl-C drains and stops.", flush=True)
        try:
            await http_server(edge, arguments.drain_timeout).serve(sockets=[listener])
        finally:  # a second signal skips what the application does at its end
            for close in edge.closers:
                close()


def make_edge(config: GatewayConfig, keys: KeyStore | None, router: Router, metrics: EdgeMetrics | None = None) -> Edge:
    """The edge of a configuration. Call it inside the event loop that will serve it."""
    storage = config.edge.storage
    quota, leases = Quota(open_storage(storage)), open_leases(storage)
    hooks = (FormatHook(config.routing.aliases), FilterHook(config.filters))
    return Edge(config, keys, quota, leases, router, hooks, metrics=metrics or EdgeMetrics())


def http_server(edge: Edge, drain_timeout_s: float = 5.0) -> uvicorn.Server:
    """uvicorn, set up to serve `edge`; streams have `drain_timeout_s` to end once it stops."""
    return uvicorn.Server(
        uvicorn.Config(
            make_app(edge),
            http=Protocol,
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, math.ceil(drain_timeout_s)),
        )
    )


def listen(address: str, port: int) -> socket.socket:
    """A listening socket; its connections end when nobody reads them. Raises SetupError when the port is busy.

    Connections send each piece of an answer at once: without TCP_NODELAY the first text would wait 40 ms for the client
    to acknowledge the headers. asyncio sets it on sockets that it makes itself, and this is none.
    """
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        remedy = "free it or choose another with --port (0: any free one)"
        raise SetupError(f"cannot listen on port {port} of {address}: {error.strerror}; {remedy}") from error
    return listener


def _keys(arguments: argparse.Namespace) -> KeyStore | None:
    if arguments.no_keys:
        if not is_loopback(f"{arguments.address}:0"):
            raise InvalidRequest(f"--no-keys must go with a loopback address, got {arguments.address}")
        logging.getLogger(__name__).warning("no keys are asked for: everybody who reaches the port may use it")
        return None
    if arguments.keys is None:
        raise InvalidRequest("give --keys FILE (make one with `tritonforge keys create`), or --no-keys")
    return KeyStore(arguments.keys)


@contextlib.contextmanager
def served(release: Path) -> Iterator[str]:
    """The gRPC endpoint of a server of our own, for as long as it is needed."""
    from tritonforge.server import Server

    with Server(release) as server:
        yield server.grpc_url

"""The target of a campaign as it says of itself: ready or not, versions, request counters. Plain gRPC, one call each.

The campaign asks before and after a load; it is no part of the measurement.
"""

import socket
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from loadtests.streams import on_channel, open_channel
from tritonforge.client import rpc_error
from tritonforge.errors import SetupError


class Unreachable(SetupError):
    """The target cannot be loaded: no connection, or the model is not ready."""


def inspect(url: str, model: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """Names and versions of server and model. Raises Unreachable when it is not ready, with the remedy."""
    with open_channel(url) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            raise Unreachable(
                f"nothing answers at {url} within {timeout_s:g} s; start the server, or give --url"
            ) from None
        stub = on_channel(channel)
        try:
            ready = stub.ModelReady(service_pb2.ModelReadyRequest(name=model), timeout=timeout_s).ready
            server = stub.ServerMetadata(service_pb2.ServerMetadataRequest(), timeout=timeout_s)
            metadata = stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=model), timeout=timeout_s)
        except grpc.RpcError as error:
            raise Unreachable(f"model {model} at {url} cannot be asked: {rpc_error(error)}") from None
    if not ready:
        raise Unreachable(f"model {model} at {url} is not ready; wait for it, or load it")
    return {
        "server": server.name,
        "server_version": server.version,
        "model": model,
        "model_versions": list(metadata.versions),
    }


def counters(url: str, model: str, timeout_s: float = 10.0) -> dict[str, int] | None:
    """How many requests of `model` the server says succeeded and failed so far; None when it does not say."""
    with open_channel(url) as channel:
        try:
            answer = on_channel(channel).ModelStatistics(
                service_pb2.ModelStatisticsRequest(name=model), timeout=timeout_s
            )
        except grpc.RpcError:
            return None
    if not answer.model_stats:
        return None
    stats = [version.inference_stats for version in answer.model_stats]
    return {"success": sum(s.success.count for s in stats), "fail": sum(s.fail.count for s in stats)}


def is_local(url: str) -> bool:
    """True when the host of `url` is this machine: client and server then compete for its cores."""
    host = url.removeprefix("grpc://").rsplit(":", 1)[0]
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
        own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return False
    return any(address.startswith("127.") or address == "::1" or address in own for address in addresses)

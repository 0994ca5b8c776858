"""The target of a campaign as it says of itself: ready or not, versions, request counters. Plain gRPC, one call each.

The campaign asks before and after a load; it is no part of the measurement.
"""

import contextlib
import re
import socket
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtests.fields import InvalidContract
from loadtests.streams import on_channel, open_channel
from tritonforge.client import rpc_error
from tritonforge.errors import SetupError

if TYPE_CHECKING:
    from loadtests.runs import Run

QUIET_S = 10.0
_GAUGE = re.compile(r"^tritonforge_(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Unreachable(SetupError):
    """The target cannot be loaded: no connection, or the model is not ready."""


def inspect(url: str, model: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """Names and versions of server and model, and the digest of the release that it serves, where the server tells it.

    Raises Unreachable when it is not ready, with the remedy.
    """
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
            digest = _release_digest(stub, model, timeout_s)
        except grpc.RpcError as error:
            raise Unreachable(f"model {model} at {url} cannot be asked: {rpc_error(error)}") from None
    if not ready:
        raise Unreachable(f"model {model} at {url} is not ready; wait for it, or load it")
    return {
        "server": server.name,
        "server_version": server.version,
        "model": model,
        "model_versions": list(metadata.versions),
        "release_digest": digest,
    }


def _release_digest(stub: service_pb2_grpc.GRPCInferenceServiceStub, model: str, timeout_s: float) -> str | None:
    """What `tritonforge serve` writes into a model's configuration; None from a server that was started otherwise."""
    try:
        answer = stub.ModelConfig(service_pb2.ModelConfigRequest(name=model), timeout=timeout_s)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return None
        raise
    return answer.config.parameters["release_digest"].string_value or None


def served_release(url: str, model: str, timeout_s: float = 10.0) -> str | None:
    """The digest of the release that a server says it serves; None when it does not say, or does not answer."""
    with open_channel(url) as channel, contextlib.suppress(grpc.RpcError):
        return _release_digest(on_channel(channel), model, timeout_s)
    return None


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


def server_state(run: "Run") -> dict[str, Any] | None:
    """Counters, gauges and release of a run's target at this moment; None when it offers no counters."""
    from loadtests.faults import rss_bytes

    found = counters(run.url, run.contract.target.model)
    if found is None:
        return None
    gauges: dict[str, float] = {}
    if run.metrics_url is not None:
        gauges = read_gauges(run.metrics_url)
    if run.server_pid is not None:
        with contextlib.suppress(InvalidContract):  # a server that died under the load has no memory to tell
            gauges["rss_bytes"] = rss_bytes(run.server_pid)
    return {"counters": found, "gauges": gauges, "release": served_release(run.url, run.contract.target.model)}


def read_gauges(metrics_url: str, timeout_s: float = 10.0) -> dict[str, float]:
    """The decoder's own counts from the metrics port: KV blocks held and tokens sampled; {} when it does not answer.

    Triton refreshes them about twice a second, and requests that just ended free their blocks a moment later: the
    gauges are read until the decoder is idle, for at most QUIET_S.
    """
    deadline = time.monotonic() + QUIET_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            with opener.open(f"http://{metrics_url}/metrics", timeout=timeout_s) as answer:
                found = {name: float(value) for name, value in _GAUGE.findall(answer.read().decode())}
        except (OSError, ValueError):
            return {}
        idle = found.get("num_requests_running", 0) + found.get("num_requests_waiting", 0) == 0
        if idle or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if "kv_blocks" not in found or "generation_tokens_total" not in found:
        return {}
    held = found["kv_blocks"] - found.get("kv_blocks_free", 0)
    return {"kv_blocks_held": held, "tokens": found["generation_tokens_total"]}


def is_local(url: str) -> bool:
    """True when the host of `url` is this machine: client and server then compete for its cores."""
    host = url.removeprefix("grpc://").rsplit(":", 1)[0]
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
        own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return False
    return any(address.startswith("127.") or address == "::1" or address in own for address in addresses)

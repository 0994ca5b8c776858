"""What a client without the launcher's key can do to a server: ask it, and nothing that changes it for others."""

import json
import socket
import urllib.error
import urllib.request
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tritonforge.client import connect, generate, infer_request
from tritonforge.launch import triton_process
from tritonforge.launch.model_control import HEADER
from tritonforge.server import Server

pytestmark = pytest.mark.server

MODEL_PY = {"parameters": {"config": '{"backend": "python"}', "file:1/model.py": "aW1wb3J0IG9z"}}
"""A load request that brings its own code: without the key this would run it."""


def str_ids(value):
    """Name a case by its method and path."""
    return value if isinstance(value, str) else ""


HTTP_CLOSED = (
    ("POST", "v2/repository/index", {}),
    ("POST", "v2/repository/models/llm/load", {}),
    ("POST", "v2/repository/models/evil/load", MODEL_PY),
    ("POST", "v2/repository/models/llm/unload", {}),
    ("POST", "v2/systemsharedmemory/region/x/register", {"key": "/x", "offset": 0, "byte_size": 1}),
    ("POST", "v2/systemsharedmemory/unregister", {}),
    ("GET", "v2/systemsharedmemory/status", None),
    ("POST", "v2/cudasharedmemory/region/x/register", {"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 1}),
    ("POST", "v2/logging", {"log_file": "/tmp/x"}),
    ("GET", "v2/logging", None),
    ("POST", "v2/trace/setting", {"trace_file": "/tmp/x"}),
    ("POST", "v2/models/llm/trace/setting", {"trace_level": ["TENSORS"]}),
)
GRPC_CLOSED = (
    ("RepositoryIndex", pb.RepositoryIndexRequest()),
    ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="llm")),
    ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="llm")),
    ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
    ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="x", key="/x", byte_size=1)),
    ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest()),
    ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="x", byte_size=1)),
    ("LogSettings", pb.LogSettingsRequest()),
    ("TraceSetting", pb.TraceSettingRequest()),
)


@pytest.mark.parametrize("headers", [{}, {HEADER: ""}, {HEADER: "0" * 64}], ids=["no key", "empty key", "wrong key"])
@pytest.mark.parametrize(("method", "path", "body"), HTTP_CLOSED, ids=str_ids)
def test_http_refuses_what_changes_the_server(server, method, path, body, headers):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http_url}/{path}", data, headers, method=method)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10)
    assert refused.value.code == 403
    assert "restricted" in refused.value.read().decode()


@pytest.mark.parametrize("key", [None, "", "0" * 64], ids=["no key", "empty key", "wrong key"])
@pytest.mark.parametrize(("call", "request_"), GRPC_CLOSED, ids=str_ids)
def test_grpc_refuses_what_changes_the_server(server, call, request_, key):
    metadata = () if key is None else ((f"triton-grpc-protocol-{HEADER}", key),)
    with connect(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            getattr(stub, call)(request_, timeout=10, metadata=metadata)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE and "restricted" in refused.value.details()


def test_what_clients_need_stays_open(server):
    with connect(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerReady(pb.ServerReadyRequest(), timeout=10).ready
        assert stub.ModelReady(pb.ModelReadyRequest(name="llm"), timeout=10).ready
        assert stub.ModelMetadata(pb.ModelMetadataRequest(name="llm"), timeout=10).name == "llm"
        assert stub.ModelStatistics(pb.ModelStatisticsRequest(name="llm"), timeout=10).model_stats
        parameters = stub.ModelConfig(pb.ModelConfigRequest(name="llm"), timeout=10).config.parameters
    assert parameters["release_digest"].string_value == server.release.digest


def test_nothing_listens_beyond_loopback_unless_told(server):
    listening = _listening({server.pid, *server.stub_pids()})
    assert len(listening) == 3 and all(address.is_loopback for address, _ in listening), listening
    assert {port for _, port in listening} == {server.ports.grpc, server.ports.http, server.ports.metrics}


def _listening(pids: set[int]) -> set[tuple[IPv4Address | IPv6Address, int]]:
    """(address, port) of the TCP sockets on which processes listen, from the kernel's tables."""
    inodes = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            target = path.readlink().name if path.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                words, port = fields[1].split(":")
                raw = b"".join(bytes.fromhex(words[n : n + 8])[::-1] for n in range(0, len(words), 8))
                address = ip_address(raw)
                found.add((getattr(address, "ipv4_mapped", None) or address, int(port, 16)))
    return found


def test_the_key_is_in_no_log_and_no_environment(server):
    key = _key(server)
    assert len(key) == 64 and key not in server.log_tail(10_000)
    for pid in (server.pid, *server.stub_pids()):
        assert key not in Path(f"/proc/{pid}/environ").read_text(errors="replace")
    assert all(key not in Path(f"/proc/{pid}/cmdline").read_text() for pid in server.stub_pids())


def _key(server) -> str:
    command = Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
    return next(one for one in command if one.startswith("--grpc-restricted-protocol")).rpartition("=")[2]


HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client opens a gRPC connection: the preface, and settings that are empty."""


@pytest.mark.slow
@pytest.mark.parametrize("opening", [b"", HTTP2], ids=["silent", "opened"])
def test_a_grpc_connection_whose_other_end_is_gone_is_closed(release_dir, monkeypatch, opening):
    """Wrong: it holds one of the process's open files for two hours. One that answers pings stays."""
    monkeypatch.setattr(
        triton_process, "KEEPALIVE", triton_process.KEEPALIVE | {"keepalive-time": 1000, "keepalive-timeout": 1000}
    )
    with Server(release_dir) as server, connect(server.grpc_url) as channel:
        assert generate(channel, infer_request("llm", text="Hello", max_tokens=1), 60).finish_reason == "length"
        with socket.create_connection((server.host, server.ports.grpc), timeout=60) as gone:
            gone.sendall(opening)
            while gone.recv(4096):  # settings, then pings that nobody answers
                pass
        request = infer_request("llm", text="Once", max_tokens=300, ignore_eos=True, stream_interval_ms=10_000)
        assert generate(channel, request, 120).finish_reason == "length"

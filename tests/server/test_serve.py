"""Served behaviour around the models: start, drain, death, refusal. What would be wrong is in each test's name.

Each test starts its own server, because it ends or breaks it.
"""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tritonforge.client import connect, infer_request, stream
from tritonforge.errors import EngineFailure, Overloaded, SetupError, TritonForgeError
from tritonforge.launch.drain import HUNG_S
from tritonforge.launch.ports import Ports
from tritonforge.launch.supervisor import RestartPolicy, State
from tritonforge.release import Release
from tritonforge.server import Server

pytestmark = pytest.mark.server

STREAMS_END_S = 5.0
BACK_S = 15.0
LEFTOVERS = ((Path("/dev/shm"), "tritonforge-*"), (Path("/tmp"), "tritonforge-*"), (Path("/tmp"), "python_env_*"))
"""Another server that starts at the same time would show here as well: these tests want the machine's Triton alone."""


def leftovers() -> set[Path]:
    """What a server may leave in shared and temporary folders."""
    return {path for folder, pattern in LEFTOVERS for path in folder.glob(pattern)}


def is_ready(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"http://{server.http_url}/v2/health/ready", timeout=2) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Wait for `condition` and return the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)
    return time.monotonic() - started


def long_request(model: str = "llm", max_tokens: int = 1500):
    options = {"text": "Once upon a time"} if model == "llm" else {"input_ids": [1, 2, 3]}
    return infer_request(model, stream=True, max_tokens=max_tokens, ignore_eos=True, **options)


class Load:
    """Open streams, each in a thread; `ends` are (monotonic seconds, error or None) in the order they were opened."""

    def __init__(self, url: str, requests: list) -> None:
        self._pool = ThreadPoolExecutor(len(requests))
        self._started = [0] * len(requests)
        self._futures = [self._pool.submit(self._run, url, n, request) for n, request in enumerate(requests)]
        wait_until(lambda: all(self._started), 60, "every stream got a first chunk")

    def _run(self, url: str, number: int, request) -> tuple[float, TritonForgeError | None, int]:
        try:
            with connect(url) as channel:
                for chunk in stream(channel, request, timeout=120):
                    self._started[number] += len(chunk.token_ids)
        except TritonForgeError as error:
            return time.monotonic(), error, self._started[number]
        return time.monotonic(), None, self._started[number]

    def ends(self, timeout_s: float) -> list[tuple[float, TritonForgeError | None, int]]:
        return [future.result(timeout_s) for future in self._futures]


@pytest.fixture
def served(release_dir: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts `tritonforge serve` and waits until it serves; the endpoints lie in `.endpoints`."""
    started = []

    def start(*arguments: str) -> subprocess.Popen:
        ports = ("--grpc-port", "0", "--http-port", "0", "--metrics-port", "0")
        process = subprocess.Popen(
            [sys.executable, "-m", "tritonforge", "serve", "--release", str(release_dir), *ports, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Ctrl-C"):
                break
        process.endpoints = {words[0]: words[-1] for words in map(str.split, lines[1:4])}
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


def test_a_stopped_server_leaves_nothing_behind(release_dir):
    before = leftovers()
    with Server(release_dir) as server:
        pids = [server.pid, *server.stub_pids()]
        assert len(pids) == 3, "one tritonserver, a stub each for tokenizer and decoder"
        assert is_ready(server)
        assert leftovers() > before
    assert not any(map(is_alive, pids))
    assert leftovers() <= before
    Release.open(release_dir).verify()


def test_serving_writes_only_bytecode_into_the_release(release_dir, tmp_path):
    copy = shutil.copytree(release_dir, tmp_path / "release", ignore=shutil.ignore_patterns("__pycache__"))
    before = _files(copy)
    with Server(copy):
        pass
    assert _files(copy) == before


def _files(folder: Path) -> dict[Path, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize("victim", ["decoder", "tokenizer", "tritonserver"])
def test_streams_end_and_service_returns_when_a_process_is_killed(release_dir, victim):
    before = leftovers()
    with Server(release_dir) as server:
        first = server.pid
        load = Load(server.grpc_url, [long_request("llm" if n % 2 else "decoder") for n in range(8)])
        killed = time.monotonic()
        os.kill(_pid_of(server, victim), signal.SIGKILL)
        wait_until(lambda: not is_ready(server), STREAMS_END_S, "not ready")
        ends = load.ends(STREAMS_END_S)
        assert all(isinstance(error, Overloaded) for _, error, _ in ends), "every stream ends with an error"
        assert max(end for end, _, _ in ends) - killed < STREAMS_END_S
        wait_until(lambda: is_ready(server) and server.pid != first, BACK_S, "back")
        server.wait_for(State.SERVING, timeout_s=BACK_S)
        print(f"{victim} killed: streams ended {max(e for e, _, _ in ends) - killed:.2f} s later, ", end="")
        print(f"serving again {time.monotonic() - killed:.2f} s later")
        assert time.monotonic() - killed < BACK_S
        assert list(stream(server.grpc_url, long_request(max_tokens=4), timeout=30))[-1].finish_reason == "length"
    assert leftovers() <= before, "also the dead server's regions are removed"


def _pid_of(server: Server, name: str) -> int:
    if name == "tritonserver":
        return server.pid
    return next(pid for pid in server.stub_pids() if f"/{name}/" in Path(f"/proc/{pid}/cmdline").read_text())


def test_a_server_that_keeps_dying_is_given_up(release_dir):
    before = leftovers()
    with Server(release_dir, policy=RestartPolicy(limit=1)) as server:
        first = server.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: server.pid != first, BACK_S, "restarted")
        server.wait_for(State.SERVING, timeout_s=BACK_S)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(EngineFailure, match="gave up after 1 restarts"):
            server.wait_for(State.STOPPED, timeout_s=BACK_S)
    assert leftovers() <= before


def test_sigterm_lets_running_streams_finish_and_refuses_new_ones(served):
    before = leftovers()
    process = served()
    url = process.endpoints["gRPC"]
    load = Load(url, [long_request("llm" if n % 2 else "decoder", max_tokens=300) for n in range(4)])
    process.send_signal(signal.SIGTERM)
    assert "draining" in process.stderr.readline()
    wait_until(lambda: not _accepts(url), 5, "new requests are refused")
    ends = load.ends(60)
    assert [(error, tokens) for _, error, tokens in ends] == [(None, 300)] * 4
    assert process.wait(20) == 0
    assert leftovers() <= before


def _accepts(url: str) -> bool:
    try:
        list(stream(url, long_request(max_tokens=1), timeout=30))
    except Overloaded:
        return False
    return True


def test_a_second_signal_stops_at_once(served):
    before = leftovers()
    process = served("--drain-timeout", "100")
    load = Load(process.endpoints["gRPC"], [long_request()])
    process.send_signal(signal.SIGINT)
    assert "draining" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 0
    assert isinstance(load.ends(5)[0][1], Overloaded)
    assert leftovers() <= before


def test_streams_longer_than_the_drain_timeout_are_cancelled(release_dir):
    with Server(release_dir, drain_timeout_s=1) as server:
        request = long_request("decoder", max_tokens=1900)
        with ThreadPoolExecutor(1) as pool, connect(server.grpc_url) as channel:
            chunks = stream(channel, request, timeout=60)
            next(chunks)
            last = pool.submit(lambda: list(chunks)[-1])
            started = time.monotonic()
            server.stop()
            assert last.result(5).finish_reason == "cancelled"
    assert time.monotonic() - started < 15


def test_an_idle_http_connection_holds_up_neither_refusal_nor_exit(release_dir):
    before = leftovers()
    with Server(release_dir, drain_timeout_s=60) as server:
        connection = http.client.HTTPConnection(server.http_url, timeout=10)
        connection.request("GET", "/v2/health/ready")
        connection.getresponse().read()
        started = time.monotonic()
        server.ask_stop()
        wait_until(lambda: not _accepts(server.grpc_url), 5, "new requests are refused")
    assert time.monotonic() - started < 15, "Triton alone waits for the connection as long as it may"
    assert leftovers() <= before


def test_nothing_outlives_a_killed_supervisor(served, release_dir):
    before = leftovers()
    process = served()
    children = _descendants(process.pid)
    assert len(children) == 3
    process.kill()
    wait_until(lambda: not any(map(is_alive, children)), 5 + HUNG_S, "tritonserver and stubs are gone")
    with Server(release_dir):
        pass
    left = {path for path in leftovers() - before if not path.name.startswith("python_env_")}
    assert not left, "the next start sweeps what a killed supervisor left"


def _descendants(pid: int) -> list[int]:
    children = [
        int(child) for child in Path(f"/proc/{pid}/task").glob("*/children") for child in child.read_text().split()
    ]
    return children + [grandchild for child in children for grandchild in _descendants(child)]


def test_one_changed_byte_is_refused_by_name(release_dir, tmp_path):
    copy = shutil.copytree(release_dir, tmp_path / "release")
    engine = copy / "model_repository" / "decoder" / "1" / "engine" / "openvino_model.bin"
    engine.chmod(0o644)
    with open(engine, "r+b") as file:
        file.seek(engine.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes((byte ^ 1,)))
    before = leftovers()
    command = [sys.executable, "-m", "tritonforge", "serve", "--release", str(copy)]
    done = subprocess.run(
        [*command, "--grpc-port", "0", "--http-port", "0", "--metrics-port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "model decoder does not load" in done.stderr and "engine/openvino_model.bin" in done.stderr
    assert leftovers() <= before


def test_a_busy_port_is_named_with_its_remedy(release_dir):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SetupError, match=rf"http port {port} .*--http-port"):
            Server(release_dir, ports=Ports(0, port, 0))

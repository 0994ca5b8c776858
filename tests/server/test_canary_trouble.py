"""A canary that goes wrong on a real server: changed on disk, hanging at its load, too large. The stable one serves on.

It starts its own server, because it changes what is served.
"""

import logging
import re
import threading
import time
import urllib.request
from collections.abc import Callable

import pytest

from tests.server.releases import sibling, spoil
from tritonforge import cli
from tritonforge.client import connect, generate, infer_request, stream
from tritonforge.errors import Cancelled, DeadlineExceeded, TritonForgeError
from tritonforge.launch.supervisor import State
from tritonforge.rollout import room
from tritonforge.rollout.route_client import Router, fetch_route
from tritonforge.server import Server

pytestmark = pytest.mark.server

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def server(release_dir):
    with Server(release_dir, route_grace_s=0.5) as running:
        yield running


@pytest.fixture
def untouched(server):
    """At the end the same server serves, with the stable release's processes alone, and takes requests."""
    pid, stubs, version = server.pid, server.stub_pids(), str(server.rollout.describe()["served"][0]["version"])
    yield
    wait_until(lambda: server.stub_pids() == stubs, "only the stable release's processes are left")
    assert server.pid == pid and server.state is State.SERVING
    with connect(server.grpc_url) as channel:
        assert fetch_route(channel).canary is None
        assert generate(channel, infer_request("llm", text="Hello", max_tokens=2), TIMEOUT_S).version == version


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def command(server: Server, action: str, *arguments: str) -> int:
    return cli.main(["release", action, "--port", str(server.ports.grpc), *arguments])


def given_up(server: Server) -> set[float]:
    """What the decoders tell of canaries that were given up."""
    page = urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=30).read().decode()
    return {
        float(value) for value in re.findall(r"^tritonforge_canaries_given_up_total\{.*\} (\S+)$", page, re.MULTILINE)
    }


def test_a_canary_that_is_changed_on_disk_goes_alone(server, untouched, release_dir, tmp_path, caplog):
    """Wrong: every stream of the stable release ends because of another's files."""
    second = sibling(release_dir, tmp_path / "second")
    server.rollout.canary(second, None, ["acme"])
    with connect(server.grpc_url) as channel:
        router = Router(channel, refresh_s=0.1)
        stable = stream(
            channel,
            infer_request("llm", text="Once", max_tokens=200, ignore_eos=True, stream=True, speculate=False),
            TIMEOUT_S,
        )
        canaried = router.stream(
            infer_request("llm", text="Once", tenant="acme", max_tokens=1500, ignore_eos=True, stream=True), TIMEOUT_S
        )
        tokens = len(next(stable).token_ids)
        next(canaried)
        with caplog.at_level(logging.INFO, "tritonforge.server"):
            changed = spoil(second)
            assert list(canaried)[-1].finish_reason == "cancelled", "nobody gets more of a changed release"
            wait_until(lambda: fetch_route(channel).canary is None, "the canary is taken back")
        rest = list(stable)
    assert tokens + sum(len(chunk.token_ids) for chunk in rest) == 200 and rest[-1].finish_reason == "length"
    assert changed.name in caplog.text and "is taken back" in caplog.text
    wait_until(lambda: given_up(server) == {1.0}, "the metrics tell it")


def test_a_canary_that_hangs_while_it_loads_is_listed_and_rolled_back(server, untouched, release_dir, tmp_path, capsys):
    hanging, raised = sibling(release_dir, tmp_path / "hanging", hangs=True), []
    thread = threading.Thread(target=lambda: raised.append(attempt(lambda: server.rollout.canary(hanging, 0.5))))
    thread.start()
    number = None
    wait_until(lambda: len(server.rollout.describe()["served"]) == 2, "the canary is being loaded")
    number = server.rollout.describe()["served"][1]["version"]
    loading = f"/decoder/{number}/model.py"
    wait_until(lambda: any(loading in line_of(pid) for pid in server.stub_pids()), "its decoder has a process")
    assert command(server, "list") == 0 and "loading" in capsys.readouterr().out
    assert command(server, "promote") == cli.EXIT_FAILED and "under way" in capsys.readouterr().err
    with connect(server.grpc_url) as channel:
        assert generate(channel, infer_request("llm", text="Hello", max_tokens=2), TIMEOUT_S).version != str(number)
    assert command(server, "rollback") == 0
    thread.join(TIMEOUT_S)
    assert isinstance(raised[0], Cancelled)


@pytest.mark.slow
def test_a_canary_that_hangs_while_it_loads_is_given_up_in_time(server, untouched, release_dir, tmp_path, monkeypatch):
    hanging = sibling(release_dir, tmp_path / "hanging", hangs=True)
    monkeypatch.setattr(server.rollout._running, "_load_timeout_s", 10.0)
    with pytest.raises(DeadlineExceeded, match="model decoder: RepositoryModelLoad took longer than 10 s"):
        server.rollout.canary(hanging, 0.5)


def test_a_canary_that_needs_more_memory_than_there_is_is_loaded_only_when_that_is_asked_for(
    server, untouched, release_dir, tmp_path, capsys, monkeypatch
):
    second = str(sibling(release_dir, tmp_path / "second"))
    monkeypatch.setattr(room, "available_bytes", lambda: 300 * 2**20)
    assert command(server, "canary", second, "--share", "10") == cli.EXIT_FAILED
    told = capsys.readouterr().err
    assert re.search(r"release second needs \d+ MiB \(decoder \d+, tokenizer \d+\).* have 300 MiB left", told), told
    assert command(server, "canary", second, "--share", "10", "--ignore-memory") == 0
    assert "10.00%" in capsys.readouterr().out
    assert command(server, "rollback") == 0


def attempt(call: Callable[[], object]) -> TritonForgeError | None:
    """The error that it raised."""
    try:
        call()
    except TritonForgeError as error:
        return error
    return None


def line_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""

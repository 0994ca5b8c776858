"""Releases change on a server under load: a share goes to the canary, and no stream is dropped, cut short or mixed.

It starts its own server, because it changes what is served.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loadtests.contract_toml import load_contract
from loadtests.exits import FAILED, INVALID
from loadtests.export_indicators import histogram_buckets
from tests.server.releases import sibling
from tritonforge import cli
from tritonforge.client import cancel, connect, generate, infer_request, stream
from tritonforge.errors import EngineFailure, NotFound
from tritonforge.launch.supervisor import State
from tritonforge.release import Release
from tritonforge.rollout.route_client import Router, fetch_route
from tritonforge.rollout.routing import Share
from tritonforge.rollout.serving_repository import FIRST_VERSION
from tritonforge.server import Server

pytestmark = pytest.mark.server

TOKENS, TIMEOUT_S = 4, 60.0
REFRESH_S = 0.25
CONTRACT = Path(__file__).resolve().parent.parent.parent / "loadtests/contracts/demo.toml"
BOUNDS = {40: (0, 22), 200: (16, 69)}
"""Of so many streams at 20%: outside with a probability of 1e-6 at most on either side, were the ids drawn anew."""


@dataclass
class Load:
    """Streams without a pause, from several threads; `ended` has an entry for each one, by the phase it began in."""

    router: Router
    phase: str = "before"
    ended: list[tuple[str, str, set[str], int, str | None]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def work(self, worker: int) -> None:
        """One thread's streams: (phase, request id, versions that answered, tokens, error or finish reason)."""
        number = 0
        while not self.stop.is_set():
            phase, request_id = self.phase, f"{worker}-{number}"
            request = infer_request(
                "llm", text="Once", request_id=request_id, max_tokens=TOKENS, ignore_eos=True, stream=True, seed=number
            )
            versions, tokens, how = set(), 0, None
            try:
                for chunk in self.router.stream(request, TIMEOUT_S):
                    versions.add(chunk.version)
                    tokens += len(chunk.token_ids)
                    how = chunk.finish_reason
            except Exception as error:
                how = repr(error)
            self.ended.append((phase, request_id, versions, tokens, how))
            number += 1

    def run(self, phase: str, count: int) -> list[tuple]:
        """Go on until `count` streams that began in this phase have ended; return these.

        Others that began in it may go where the next phase leads: a thread can be held up before it asks for its route.
        """
        self.phase = phase
        wait_until(lambda: len(self.of(phase)) >= count, f"{count} streams of phase {phase}")
        return self.of(phase)

    def of(self, phase: str) -> list[tuple]:
        return [end for end in list(self.ended) if end[0] == phase]


def versions_of(ended: list[tuple]) -> set[str]:
    """The versions that answered these streams."""
    return {version for end in ended for version in end[2]}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def second(release_dir, tmp_path_factory):
    """Another release: a copy by hard links needs the same file system."""
    return sibling(release_dir, tmp_path_factory.mktemp("releases", numbered=True) / "second")


@pytest.fixture(scope="module")
def server(release_dir, tmp_path_factory):
    buckets = tmp_path_factory.mktemp("buckets") / "buckets.json"
    buckets.write_text(json.dumps(histogram_buckets(load_contract(CONTRACT))))
    with Server(release_dir, route_grace_s=4 * REFRESH_S, histogram_buckets=buckets) as running:
        yield running


@pytest.fixture
def router(server):
    with connect(server.grpc_url) as channel:
        yield Router(channel, refresh_s=REFRESH_S)


def stubs_of(server: Server, version: int) -> list[int]:
    command = "/proc/{}/cmdline"
    return [pid for pid in server.stub_pids() if f"/{version}/model.py" in open(command.format(pid)).read()]


def test_a_release_that_does_not_load_leaves_the_old_one_serving(server, router, release_dir, tmp_path):
    broken = sibling(release_dir, tmp_path / "broken", engine=b"<net/>")
    stubs = server.stub_pids()
    with pytest.raises(EngineFailure, match="Unable to read the model"):
        server.rollout.canary(broken, 0.5)
    assert router.route().canary is None
    with connect(server.grpc_url) as channel:
        assert generate(channel, infer_request("llm", text="Hello", max_tokens=2), TIMEOUT_S).version == str(
            FIRST_VERSION
        )
    assert server.state is State.SERVING
    wait_until(lambda: server.stub_pids() == stubs, "the broken release's processes are gone, the others the same")


@pytest.mark.parametrize(("streams", "workers"), [(40, 3), pytest.param(200, 8, marks=pytest.mark.slow)])
def test_canary_promotion_and_rollback_under_load(server, router, second, streams, workers):
    """Streams at 20%, then a promotion, then the way back, while streams begin and end all the time."""
    first_digest, load = server.release.digest, Load(router)
    old = str(router.route().stable.version)
    with ThreadPoolExecutor(workers) as pool:
        working = [pool.submit(load.work, number) for number in range(workers)]
        try:
            before = load.run("before", workers)
            load.phase = "loading"
            server.rollout.canary(second, 0.2)
            wait_until(lambda: router.route().canary is not None, "the route leads to the canary")
            canaried = load.run("canary", streams)
            load.phase = "promoting"
            server.rollout.promote()
            after_promotion = load.run("promoted", workers)
            promoted = router.route().stable
            load.phase = "rolling back"
            server.rollout.rollback()
            load.run("back", workers)
        finally:
            load.stop.set()
    assert all(future.exception() is None for future in working)
    bad = [end for end in load.ended if end[3] != TOKENS or end[4] != "length" or len(end[2]) != 1]
    assert not bad, "failed, truncated or mixed"

    print({phase: Counter(version for end in load.of(phase) for version in end[2]) for phase, *_ in load.ended})
    canary = str(promoted.version)
    assert versions_of(before) == {old}
    for _, request_id, versions, *_ in canaried:
        assert versions == {canary if Share(0.2).takes(request_id) else old}
    least, most = BOUNDS[streams]
    assert least <= sum(end[2] == {canary} for end in canaried[:streams]) <= most
    assert versions_of(after_promotion) == {canary} and promoted.digest != first_digest
    with connect(server.grpc_url) as channel:
        back = fetch_route(channel)
    assert back.stable.digest == first_digest and versions_of(load.of("back")) == {str(back.stable.version)}
    wait_until(lambda: not stubs_of(server, promoted.version), "the release that was taken back is unloaded")
    assert server.state is State.SERVING and server.rollout.describe()["previous"] is None


def test_a_long_stream_ends_well_after_its_release_was_replaced(server, router, second, capsys):
    """Wrong: a promotion would wait for the longest stream, or cut it. The commands are those of the command line."""

    def command(action: str, *arguments: str) -> tuple[int, str]:
        code = cli.main(["release", action, "--port", str(server.ports.grpc), *arguments])
        return code, capsys.readouterr().out

    old = router.route().stable.version
    request = infer_request("llm", text="Once", max_tokens=250, ignore_eos=True, stream=True, speculate=False)
    with connect(server.grpc_url) as channel:
        chunks = stream(channel, request, TIMEOUT_S)
        tokens = len(next(chunks).token_ids)
        assert command("canary", str(second), "--tenant", "acme")[0] == 0
        canaried = infer_request("llm", text="Once", tenant="acme", max_tokens=400, ignore_eos=True, stream=True)
        wait_until(lambda: router.target(canaried).model == "llm_canary", "the tenant's route leads to the canary")
        assert router.target(request).model == "llm"
        abandoned = router.stream(canaried, TIMEOUT_S)
        version = next(abandoned).version
        with pytest.raises(NotFound):
            cancel(channel, canaried.id)
        cancel(channel, canaried.id, version=version)
        assert list(abandoned)[-1].finish_reason == "cancelled", "a cancel reaches the version that answers"
        code, verdict = command("promote", "--contract", str(CONTRACT), "--metrics-port", str(server.ports.metrics))
        assert code == INVALID and "INCONCLUSIVE" in verdict, "two requests prove nothing"
        assert "100.00% of acme" in command("list")[1]
        assert command("promote")[0] == 0
        rest = list(chunks)
    assert tokens + sum(len(chunk.token_ids) for chunk in rest) == 250
    assert {chunk.version for chunk in rest} == {str(old)} and rest[-1].finish_reason == "length"


@pytest.mark.slow
def test_a_canary_is_promoted_when_it_keeps_its_contract_and_not_when_it_breaks_it(
    server, router, release_dir, second, tmp_path, capsys
):
    """Wrong: a release that breaks its promise takes over, or one that keeps it cannot. Exit codes are verdicts."""

    def promote(contract: Path) -> tuple[int, str]:
        ports = ["--port", str(server.ports.grpc), "--metrics-port", str(server.ports.metrics)]
        code = cli.main(["release", "promote", *ports, "--contract", str(contract)])
        return code, capsys.readouterr().out

    strict = tmp_path / "strict.toml"
    promised, text = 'metric = "ttft_ms"\nquantile = 0.95\nle = ', CONTRACT.read_text()
    assert promised in text
    strict.write_text(text.replace(f"{promised}1500", f"{promised}5"))
    stable = server.release.digest
    other = second if stable == Release.open(release_dir).digest else release_dir
    server.rollout.canary(other, None, ["acme"])
    wait_until(lambda: router.target(asked("acme", 0)).model == "llm_canary", "the tenant's route leads to the canary")
    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(lambda number: list(router.stream(asked("acme", number), TIMEOUT_S))[-1], range(140)))
    assert {chunk.finish_reason for chunk in ended} == {"length"}
    wait_until(lambda: "0/140" in promote(strict)[1], "the metrics know of all requests")
    code, told = promote(strict)
    assert code == FAILED and "FAIL" in told
    assert [row["role"] for row in server.rollout.describe()["served"]] == ["stable", "canary"]
    code, told = promote(CONTRACT)
    assert code == 0 and "PASS" in told
    assert server.release.digest == Release.open(other).digest


def asked(tenant: str, number: int):
    """A request of two tokens."""
    return infer_request(
        "llm", text="Once", request_id=f"{tenant}-{number}", tenant=tenant, max_tokens=2, ignore_eos=True, stream=True
    )

"""What rehearsals are made of: the rehearsal as data, the stage on which it runs, and the hands it works with.

A rehearsal does harm to a service of its own and writes down what its users saw; `Stage.see` is the only way to do so.
"""

import contextlib
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tritonforge.client import connect, infer_request, stream
from tritonforge.errors import TritonForgeError
from tritonforge.release import Release
from tritonforge.server import Server

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT_RUN"
POLL_S = 0.02
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NotPossible(Exception):
    """This machine cannot stage the rehearsal; the text says what it lacks."""


@dataclass(frozen=True)
class Seen:
    """One thing that was looked at: whether it was as it must be, and what was really seen."""

    id: str
    ok: bool
    text: str


@dataclass
class Stage:
    """One rehearsal's place: the release to harm copies of, a scratch folder, and what was seen so far."""

    release: Release
    scratch: Path
    seen: list[Seen] = field(default_factory=list)

    def see(self, what: str, ok: bool, text: str) -> None:
        """Write down an outcome, by its id in the rehearsal's `must_see`."""
        self.seen.append(Seen(what, bool(ok), text))


@dataclass(frozen=True)
class Rehearsal:
    """A fault and what users must see of it. `must_see` maps an id to a sentence; `run` sees each of them once.

    `limit_s` is the longest it may take: beyond it something hangs.
    """

    id: str
    fault: str
    must_see: dict[str, str]
    run: Callable[[Stage], None]
    limit_s: float = 120.0


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float | None:
    """Seconds until `condition` was true, None when it was not within the time."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_s:
            return None
        time.sleep(POLL_S)
    return time.monotonic() - started


def took(seconds: float | None, limit_s: float) -> str:
    """A time for people."""
    return f"not within {limit_s:g} s" if seconds is None else f"after {seconds:.2f} s"


def is_ready(http_url: str) -> bool:
    """What a load balancer asks."""
    try:
        with NO_PROXY.open(f"http://{http_url}/v2/health/ready", timeout=2) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def metric(server: Server, name: str) -> float:
    """A decoder metric on the metrics port, named without its prefix; NaN while the server does not answer."""
    try:
        with NO_PROXY.open(f"http://{server.metrics_url}/metrics", timeout=5) as answer:
            found = re.search(rf"^tritonforge_{name}{{.*}} (\S+)$", answer.read().decode(), re.MULTILINE)
    except (OSError, urllib.error.URLError):
        return float("nan")
    return float(found.group(1)) if found else float("nan")


def request_of(model: str = "llm", max_tokens: int = 8, **options):
    """A request whose answer has exactly so many tokens."""
    given = {"input_ids": [504, 3575, 282]} if model == "decoder" else {"text": "Once upon a time there was a"}
    return infer_request(model, stream=True, max_tokens=max_tokens, ignore_eos=True, **given, **options)


@dataclass
class Answer:
    """What the client of one stream saw: when tokens came (monotonic seconds), and how it ended."""

    sent: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    error: TritonForgeError | None = None
    ended: float | None = None

    @property
    def ok(self) -> bool:
        return self.ended is not None and self.error is None

    @property
    def code(self) -> str:
        return "ok" if self.error is None else self.error.code

    @property
    def ttft_s(self) -> float | None:
        return self.times[0] - self.sent if self.times else None

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


def ends(answers: list[Answer]) -> str:
    """How streams ended, counted."""
    return ", ".join(f"{count} {code}" for code, count in sorted(Counter(a.code for a in answers).items()))


class Crowd:
    """Clients, each with a connection and a thread of its own, as users have them."""

    def __init__(self, url: str, timeout_s: float = 60.0):
        self._url, self._timeout_s = url, timeout_s
        self._pool = ThreadPoolExecutor(256)
        self.answers: list[Answer] = []
        self._futures: list[Future] = []

    def ask(self, request) -> Answer:
        """Send a request now; the answer fills while it comes."""
        answer = Answer(time.monotonic())
        self.answers.append(answer)
        self._futures.append(self._pool.submit(self._follow, request, answer))
        return answer

    def _follow(self, request, answer: Answer) -> None:
        answer.sent = time.monotonic()
        try:
            with connect(self._url) as channel:
                for chunk in stream(channel, request, timeout=self._timeout_s):
                    if chunk.token_ids:
                        answer.times.append(time.monotonic())
                        answer.tokens += len(chunk.token_ids)
        except TritonForgeError as error:
            answer.error = error
        answer.ended = time.monotonic()

    def all_started(self, timeout_s: float = 60.0) -> bool:
        """Whether every answer has its first token within the time."""
        return wait_until(lambda: all(answer.times or answer.ended for answer in self.answers), timeout_s) is not None

    def finish(self, timeout_s: float) -> bool:
        """Wait for all answers to end; False when one has not within the time."""
        return wait_until(lambda: all(future.done() for future in self._futures), timeout_s) is not None


def ask_once(url: str, *, timeout_s: float = 30.0, **options) -> Answer:
    """One request and its whole answer."""
    crowd = Crowd(url, timeout_s)
    answer = crowd.ask(request_of(**options))
    crowd.finish(timeout_s + 5)
    return answer


def see_service(stage: Stage, url: str, what: str = "back") -> None:
    """See that an ordinary request is answered in full, by itself: nobody has touched the service."""
    answer = ask_once(url, max_tokens=8)
    stage.see(what, answer.ok and answer.tokens == 8, f"a new request: {answer.code}, {answer.tokens} of 8 tokens")


@dataclass
class Served:
    """`tritonforge serve` as a person runs it. `output` is what it said on stderr after it ended."""

    code: int | None
    output: str
    seconds: float
    was_ready: bool


def serve(root: Path, ports: tuple[int, int, int], timeout_s: float) -> Served:
    """Run `tritonforge serve` on a release until it ends; it is killed, with code None, when it does not."""
    command = [sys.executable, "-m", "tritonforge", "serve", "--release", str(root)]
    for name, port in zip(("grpc", "http", "metrics"), ports, strict=True):
        command += [f"--{name}-port", str(port)]
    started, ready = time.monotonic(), False
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and time.monotonic() - started < timeout_s:
            ready = ready or is_ready(f"127.0.0.1:{ports[1]}")
            time.sleep(0.1)
        code = process.poll()
    finally:
        process.kill()
    return Served(code, process.stderr.read(), time.monotonic() - started, ready)


@contextlib.contextmanager
def serving(release: Release | Path, **options) -> Iterator[Server]:
    """A supervised server on free ports."""
    with Server(release.root if isinstance(release, Release) else release, **options) as server:
        yield server

"""Is the service up? One answer for Kubernetes, load balancers, the launcher and people: ready, or which way it is not.

A service is ready when a real token came out lately, or comes out when it is asked for one. `tritonforge probe` runs
this every few seconds, so it imports the standard library only.
"""

import http.client
import json
import re
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tritonforge.launch.ports import is_loopback
from tritonforge.launch.state_file import find_state

PROBE_TENANT = "tritonforge-probe"
"""The tenant of the requests that ask for a token: no user's, so they are not among the requests that are counted."""
RECENT_S = 10.0
"""A token that came out so lately proves that the service generates; without one it is asked for one."""
BUSY_TIMEOUT_S = 0.5
"""For a second look at the metrics, after no token came out in time."""
SILENT_S = 3.0
"""A decoder tells every second that it lives; one that has not for longer is stalled."""
STEPS = "step_seconds_count"
_SAMPLE = re.compile(
    rf"^tritonforge_(not_ready|heartbeat_timestamp_seconds|last_token_timestamp_seconds|{STEPS})"
    r"\{([^}]*)\} (-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)$",
    re.MULTILINE,
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Condition(IntEnum):
    """What a service can be; the number is the exit code of `tritonforge probe`."""

    READY = 0
    STARTING = 3
    SATURATED = 4
    DRAINING = 5
    STALLED = 6
    DEAD = 7


PURPOSES = {
    "readiness": {Condition.READY},
    "liveness": set(Condition) - {Condition.STALLED, Condition.DEAD},
    "startup": {Condition.READY, Condition.SATURATED, Condition.DRAINING},
}
"""Which conditions are a yes to which question: may it get requests, must it not be restarted, has it started."""


@dataclass(frozen=True)
class Verdict:
    """A condition and its cause, in words."""

    condition: Condition
    cause: str

    def __str__(self) -> str:
        return f"{self.condition.name.lower()}: {self.cause}"


@dataclass(frozen=True)
class Target:
    """The HTTP and metrics endpoints of a server, each host:port, and its model that takes text."""

    url: str = "127.0.0.1:8000"
    metrics_url: str | None = "127.0.0.1:8002"
    model: str = "llm"

    @property
    def port(self) -> int:
        """The HTTP port."""
        return int(self.url.rpartition(":")[2])


def check(target: Target, timeout_s: float = 4.0) -> Verdict:
    """The condition of a service, within about `timeout_s` seconds. It asks for a token only when none came lately.

    A token that does not come in time proves nothing while the decoder's steps go on, through long prompts for example.
    """
    deadline = time.monotonic() + timeout_s
    verdict = _supervisor(target) or _server(target, deadline)
    if verdict is not None:
        return verdict
    before = _decoder(target, deadline)
    verdict = before.verdict() if before else None
    if verdict is not None:
        return verdict
    verdict = generate_token(target, deadline - time.monotonic())
    if verdict.condition is Condition.STALLED and before is not None:
        return _busy(before, _decoder(target, time.monotonic() + BUSY_TIMEOUT_S)) or verdict
    return verdict


def generate_token(target: Target, timeout_s: float) -> Verdict:
    """READY when one token is generated within `timeout_s` seconds."""
    body = json.dumps({"text_input": "Hello", "max_tokens": 1, "tenant": PROBE_TENANT})
    path = f"/v2/models/{target.model}/generate"
    try:
        status, text = _call(target.url, "POST", path, time.monotonic() + timeout_s, body)
    except TimeoutError:
        return Verdict(Condition.STALLED, f"no token came out within {timeout_s:.1f} s")
    except (OSError, http.client.HTTPException) as error:
        return Verdict(Condition.DEAD, f"the server ended while it was asked for a token: {error}")
    if status == 200 and '"error"' not in text[:20]:
        return Verdict(Condition.READY, "a token came out when it was asked for")
    return Verdict(_refusal(text), f"asked for a token, it answered {status}: {text[:300]}")


def _refusal(text: str) -> Condition:
    """What an error in place of a token says about the service."""
    if "is draining" in text or "has stopped" in text or "is stopping" in text:
        return Condition.DRAINING
    if "is not healthy" in text:  # Triton has given its process up
        return Condition.STALLED
    if "UNAVAILABLE" in text or "Exceeds maximum queue size" in text:
        return Condition.SATURATED
    return Condition.DEAD


def _supervisor(target: Target) -> Verdict | None:
    """What the supervisor of a server on this machine says; None when there is none, or it says that it serves."""
    found = find_state(target.url) if is_loopback(target.url) else None
    if found is None or found[0].state == "serving":
        return None
    told = found[0]
    seconds = time.time() - told.since_s
    if not told.alive:
        return None  # killed, and the server with it
    condition = {"starting": Condition.STARTING, "restarting": Condition.STARTING, "draining": Condition.DRAINING}
    cause = f"{told.state} for {seconds:.1f} s" + (f": {told.cause}" if told.cause else "")
    return Verdict(condition.get(told.state, Condition.DEAD), cause)


def _server(target: Target, deadline: float) -> Verdict | None:
    """What tritonserver says; None when its models are loaded."""
    try:
        live, _ = _call(target.url, "GET", "/v2/health/live", deadline)
        ready, text = _call(target.url, "GET", f"/v2/models/{target.model}/ready", deadline)
    except TimeoutError:
        return Verdict(Condition.STALLED, f"the server at {target.url} does not answer")
    except (OSError, http.client.HTTPException) as error:
        return Verdict(Condition.DEAD, f"nothing serves at {target.url}: {error or type(error).__name__}")
    if live != 200:
        return Verdict(Condition.STARTING, f"the server at {target.url} is not live yet")
    if ready != 200:
        return Verdict(Condition.STARTING, f"model {target.model} is not loaded: {text[:200] or ready}")
    return None


@dataclass(frozen=True)
class _Told:
    """What the decoder tells on the metrics port, of all versions that serve: Unix times, reasons and steps."""

    heartbeats: list[float]
    last_tokens: list[float]
    reasons: dict[Any, list]
    steps: dict[Any, float]
    local: bool

    def verdict(self) -> Verdict | None:
        """None when it settles nothing. One version that is ready is enough; another machine's clock is not trusted."""
        now = time.time()
        if self.local and self.heartbeats and (silent := now - max(self.heartbeats)) > SILENT_S + 1:
            return Verdict(Condition.STALLED, f"the decoder has not been seen alive for {silent:.0f} s")
        if self.reasons and all(self.reasons.values()):
            found = sorted({reason for one in self.reasons.values() for reason in one})
            worst = max(_REASONS.get(reason, Condition.DEAD) for reason in found)
            return Verdict(worst, f"the decoder says: {', '.join(found)}")
        if self.local and self.last_tokens and now - max(self.last_tokens) <= RECENT_S:
            return Verdict(Condition.READY, f"a token came out {max(0.0, now - max(self.last_tokens)):.0f} s ago")
        return None


def _decoder(target: Target, deadline: float) -> _Told | None:
    """What the decoder tells; None when nothing is heard of it."""
    if target.metrics_url is None:
        return None
    try:
        status, text = _call(target.metrics_url, "GET", "/metrics", deadline)
    except (OSError, http.client.HTTPException):
        return None
    if status != 200:
        return None
    told = _Told([], [], {}, {}, is_loopback(target.metrics_url))
    for name, labels, value in _SAMPLE.findall(text):
        label = dict(_LABEL.findall(labels))
        version = label.get("version")
        if name == "not_ready":
            told.reasons.setdefault(version, []).extend([label.get("reason")] if float(value) else [])
        elif name == STEPS:
            told.steps[version] = float(value)
        else:
            (told.heartbeats if name.startswith("heartbeat") else told.last_tokens).append(float(value))
    return told


def _busy(before: _Told, after: _Told | None) -> Verdict | None:
    """What the decoder's own account makes of a token that did not come in time; None when it explains nothing."""
    if after is None:
        return None
    made = sum(steps - before.steps.get(version, steps) for version, steps in after.steps.items())
    verdict = after.verdict()
    if verdict is None and made > 0:
        return Verdict(Condition.SATURATED, f"no token came out in time, but {made:.0f} steps were made meanwhile")
    return verdict


_REASONS = {"queue_full": Condition.SATURATED, "draining": Condition.DRAINING, "stalled": Condition.STALLED}


def _call(url: str, method: str, path: str, deadline: float, body: str | None = None) -> tuple[int, str]:
    """Status and text of one HTTP call, no proxy. Raises TimeoutError after `deadline`, OSError, HTTPException."""
    host, _, port = url.rpartition(":")
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=remaining)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()

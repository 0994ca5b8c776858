"""All metric families of the edge, in one place: what edge_metrics.py counts, and what rules and panels are made of."""

from dataclasses import dataclass
from typing import Literal

PREFIX = "tritonforge_gateway_"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
OUTCOMES = ("ok", "refused", "failed", "disconnected", "slow_client", "revoked")
"""See records.Record."""


@dataclass(frozen=True)
class EdgeFamily:
    """A family of Prometheus: `name` is whole, as it is scraped. `values` are the known values of some labels."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    unit: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def short(self) -> str:
        """The name as prometheus_client takes it."""
        return self.name.removesuffix("_total")


def _family(name: str, kind: str, text: str, unit: str, /, *labels: str, **values: tuple[str, ...]) -> EdgeFamily:
    return EdgeFamily(PREFIX + name, kind, text, unit, labels, tuple(values.items()))  # type: ignore[arg-type]


FAMILIES = (
    _family(
        "requests_total",
        "counter",
        "Requests by outcome",
        "requests",
        "endpoint",
        "model",
        "outcome",
        "status",
        outcome=OUTCOMES,
    ),
    _family("unauthorized_total", "counter", "Requests without a valid key", "requests", "endpoint"),
    _family(
        "tokens_total",
        "counter",
        "Tokens, as they are charged",
        "tokens",
        "tenant",
        "kind",
        kind=("prompt", "cached", "completion"),
    ),
    _family(
        "tenant_requests_total", "counter", "Requests by tenant", "requests", "tenant", "outcome", outcome=OUTCOMES
    ),
    _family(
        "tries_total",
        "counter",
        "Tries at a place by how they ended",
        "tries",
        "model",
        "replica",
        "result",
        result=("ok", "unavailable", "failed", "timeout", "refused", "left"),
    ),
    _family(
        "fallbacks_total",
        "counter",
        "Answers of another model",
        "requests",
        "alias",
        "model",
        "reason",
        reason=("unavailable", "failed", "timeout"),
    ),
    _family(
        "filter_matches_total", "counter", "Requests in which a rule matched", "requests", "stage", "rule", "action"
    ),
    _family(
        "records_lost_total", "counter", "Records that could not be written", "records", "what", what=("audit", "usage")
    ),
    _family(
        "records_delay_seconds",
        "gauge",
        "For how long records cannot be written now",
        "seconds",
        "what",
        what=("audit", "usage"),
    ),
    _family("request_duration_seconds", "histogram", "From a request's arrival to its end", "seconds", "endpoint"),
    _family("first_token_seconds", "histogram", "From a request's arrival to its first token", "seconds", "model"),
    _family("requests_open", "gauge", "Requests that are being answered", "requests"),
    _family("replica_ready", "gauge", "Whether the replica says it is ready", "bool", "model", "replica"),
    _family("replica_outstanding", "gauge", "Requests that it works on", "requests", "model", "replica"),
    _family("breaker_state", "gauge", "Its breaker: 0 closed, 1 lets one try, 2 open", "state", "model", "replica"),
)
BY_NAME = {one.name.removeprefix(PREFIX): one for one in FAMILIES}

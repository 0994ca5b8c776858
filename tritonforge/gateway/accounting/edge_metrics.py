"""The metrics of the edge, for Prometheus, at /metrics: requests, tokens, replicas, breakers, filters, lost records."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from tritonforge.gateway.accounting.edge_families import BY_NAME, SECONDS
from tritonforge.gateway.accounting.records import Record

if TYPE_CHECKING:  # it imports what imports this
    from tritonforge.gateway.routing.alias_router import AliasRouter

MOST_TENANTS = 100
"""Tenants beyond that are counted together, as `other`: a series each has a price."""


class EdgeMetrics:
    """See routed.Watcher and records.Observer: both tell it what happens. Each gateway has its own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tenants: set[str] = set()
        self._requests, self._denied = self._counter("requests_total"), self._counter("unauthorized_total")
        self._tokens, self._tenant_requests = self._counter("tokens_total"), self._counter("tenant_requests_total")
        self._tries, self._fallbacks = self._counter("tries_total"), self._counter("fallbacks_total")
        self._filtered, self._lost = self._counter("filter_matches_total"), self._counter("records_lost_total")
        self._duration = self._histogram("request_duration_seconds")
        self._first = self._histogram("first_token_seconds")
        self._open, self._delay = self._gauge("requests_open"), self._gauge("records_delay_seconds")

    def _counter(self, name: str) -> Counter:
        family = BY_NAME[name]
        return Counter(family.short, family.help, family.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        family = BY_NAME[name]
        return Gauge(family.short, family.help, family.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        family = BY_NAME[name]
        return Histogram(family.short, family.help, family.labels, buckets=SECONDS, registry=self.registry)

    def watch(self, router: "AliasRouter", count_open: Callable[[], int]) -> None:
        """Read these at each scrape."""
        self._open.set_function(count_open)
        self.registry.register(Places(router))

    def observe(self, record: Record) -> None:
        """See records.Observer. A model's name is known to be one once somebody has served it."""
        model = record.model if record.served_model else ""
        tenant = self._tenant(record.tenant)
        self._requests.labels(record.endpoint, model, record.outcome, str(record.status)).inc()
        self._tenant_requests.labels(tenant, record.outcome).inc()
        kinds = {"prompt": record.prompt_tokens, "cached": record.cached_tokens, "completion": record.completion_tokens}
        for kind, count in kinds.items():
            self._tokens.labels(tenant, kind).inc(count)
        self._duration.labels(record.endpoint).observe(record.duration_ms / 1e3)
        if record.first_token_ms is not None:
            self._first.labels(model).observe(record.first_token_ms / 1e3)
        for told in record.filtered:
            self._filtered.labels(*told.split(":", 2)).inc()

    def denied(self, endpoint: str) -> None:
        """A request had no valid key."""
        self._denied.labels(endpoint).inc()

    def tried(self, model: str, replica: str, result: str) -> None:
        """See routed.Watcher."""
        self._tries.labels(model, replica, result).inc()

    def fell_back(self, alias: str, model: str, reason: str) -> None:
        """See routed.Watcher."""
        self._fallbacks.labels(alias, model, reason).inc()

    def lost(self, what: str, count: int) -> None:
        """Records of the audit, or the usage, could not be written."""
        self._lost.labels(what).inc(count)

    def writes(self, what: str, delay_s: Callable[[], float]) -> None:
        """Records of this kind are written; `delay_s` tells for how long they cannot be."""
        self._lost.labels(what)  # at 0: an alert on a series that appears with its first event would miss it
        self._delay.labels(what).set_function(delay_s)

    def exposition(self) -> bytes:
        """What /metrics answers."""
        return generate_latest(self.registry)

    def _tenant(self, name: str) -> str:
        if name not in self._tenants and len(self._tenants) >= MOST_TENANTS:
            return "other"
        self._tenants.add(name)
        return name


class Places:
    """A collector of prometheus_client: the state of every replica and managed API at the time of the scrape."""

    def __init__(self, router: "AliasRouter") -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """One gauge of each kind."""
        ready, busy, state = (_gauge(name) for name in ("replica_ready", "replica_outstanding", "breaker_state"))
        for model, desk in self._router.desks():
            ready.add_metric([model, desk.name], float(desk.healthy))
            busy.add_metric([model, desk.name], desk.outstanding)
            state.add_metric([model, desk.name], int(desk.breaker.state))
        yield from (ready, busy, state)


def _gauge(name: str) -> GaugeMetricFamily:
    family = BY_NAME[name]
    return GaugeMetricFamily(family.name, family.help, labels=family.labels)

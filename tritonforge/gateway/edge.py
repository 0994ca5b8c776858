"""What all endpoints share, and the seams where more can be put in: router, hooks on prompt and answer, observers."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tritonforge.gateway.accounting.edge_metrics import EdgeMetrics
from tritonforge.gateway.accounting.records import Observer
from tritonforge.gateway.answers import Gain
from tritonforge.gateway.config import GatewayConfig, Tenant
from tritonforge.gateway.limits.keys import KeyStore
from tritonforge.gateway.limits.leases import Leases
from tritonforge.gateway.limits.quota import Quota
from tritonforge.gateway.routing.router import Router
from tritonforge.gateway.work import Work

SETTLE_S = 5.0
"""How long requests that were cut off at the end have, to free what they hold and to be recorded."""
WATCH_S = 0.25
"""How often it is looked whether the keys of open requests are still valid."""


class AnswerFilter(Protocol):
    """Sees the answers of one request before the client does."""

    async def push(self, gain: Gain) -> Gain:
        """What may be told of `gain` now. It may hold text back, until the gain that has a finish_reason, and set that
        to content_filter; the answer is over then. Raises ApiError to end the request.
        """


Note = Callable[[str], None]
"""Takes `stage:rule:action` for the request's record, each time that a rule matches."""


class Hook(Protocol):
    """Looks at requests and answers. What it finds goes into the request's record by `note`."""

    async def on_work(self, work: Work, tenant: Tenant, note: Note) -> Work:
        """The work to do, before anything is tokenized. Raises ApiError to refuse it."""

    def filter_for(self, work: Work, tenant: Tenant, note: Note) -> AnswerFilter | None:
        """A filter for the answers of one request."""


class Revocable(Protocol):
    """An open request: it has a key, and can be ended for that."""

    key_id: str

    def end_for(self, outcome: str) -> None:
        """End it with this outcome."""


@dataclass
class Edge:
    """The gateway. `keys` None: no key is asked for, all requests are of the tenant `default`."""

    config: GatewayConfig
    keys: KeyStore | None
    quota: Quota
    leases: Leases
    router: Router
    hooks: Sequence[Hook] = ()
    observers: Sequence[Observer] = ()
    metrics: EdgeMetrics = field(default_factory=EdgeMetrics)
    closers: Sequence[Callable[[], None]] = ()
    """Called once no request is left; they may block."""
    trace_ratio: float = 0.0
    """Share of the requests without a traceparent that are traced; 0 without a collector."""
    open: set[Revocable] = field(default_factory=set)
    tasks: set[asyncio.Task] = field(default_factory=set)
    """Those that answer; each is in it until its request is settled and recorded."""

    @contextlib.asynccontextmanager
    async def running(self):
        """While the server runs: watches over keys, closes what it holds in the end."""
        watch = asyncio.create_task(self._watch_keys())
        try:
            yield
        finally:
            watch.cancel()
            if self.tasks:  # the server has cancelled them, and does not wait
                await asyncio.wait(self.tasks, timeout=SETTLE_S)
            await self.router.close()
            await self.leases.close()
            for close in self.closers:
                await asyncio.to_thread(close)

    async def _watch_keys(self) -> None:
        """End the requests whose key was revoked."""
        while self.keys is not None:
            await asyncio.sleep(WATCH_S)
            for request in tuple(self.open):
                if request.key_id and not self.keys.is_valid(request.key_id):
                    request.end_for("revoked")

"""Serves an edge on a real port from a thread, in front of a real tritonserver; what the tests of the gateway share."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from benchmarks.observe import decoder_metrics
from tritonforge.gateway.accounting.edge_metrics import EdgeMetrics
from tritonforge.gateway.accounting.keepers import keep_records
from tritonforge.gateway.accounting.records import Record
from tritonforge.gateway.command import http_server, listen, make_edge, model_info, models_of
from tritonforge.gateway.config import GatewayConfig
from tritonforge.gateway.edge import Edge
from tritonforge.gateway.limits.keys import KeyStore, create_key
from tritonforge.gateway.routing.alias_router import AliasRouter
from tritonforge.server import Server

MODEL = "smollm2-135m-int8"
START_S = 30.0


def await_metrics(server: Server, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """The decoder's metrics once `holds` is true of them."""
    deadline = time.monotonic() + START_S
    while not holds(told := decoder_metrics(server)):
        assert time.monotonic() < deadline, told
        time.sleep(0.02)
    return told


@dataclass
class Gateway:
    """A gateway that runs: its address, a key of each tenant that was asked for, and the records of its requests."""

    url: str
    keys: Mapping[str, str]
    keys_file: Path
    edge: Edge
    loop: asyncio.AbstractEventLoop
    server: uvicorn.Server
    records: list[Record] = field(default_factory=list)
    recorded: threading.Condition = field(default_factory=threading.Condition)

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes."""
        return f"{self.url}/v1"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def bearer(self, tenant: str = "open") -> dict[str, str]:
        """The header that names the tenant's key."""
        return {"Authorization": f"Bearer {self.keys[tenant]}"}

    def observe(self, record: Record) -> None:
        """Keep a record; the edge calls it."""
        with self.recorded:
            self.records.append(record)
            self.recorded.notify_all()

    def await_records(self, count: int, timeout_s: float = 60.0) -> list[Record]:
        """The records once there are `count` of them."""
        with self.recorded:
            assert self.recorded.wait_for(lambda: len(self.records) >= count, timeout_s), self.records
            return list(self.records)

    def stop(self) -> None:
        """Begin to stop, with a second for what is open."""
        self.server.config.timeout_graceful_shutdown = 1
        self.server.should_exit = True

    def call(self, coroutine: Any) -> Any:
        """The result of a coroutine that runs in the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)


@contextlib.contextmanager
def serve_gateway(
    triton: str | None,
    release: Path | None,
    folder: Path,
    tables: Mapping[str, Any] | None = None,
    tenants: tuple[str, ...] = ("open",),
    *,
    keep: bool = False,
) -> Iterator[Gateway]:
    """A gateway in front of `triton` (host:port), or of the [models] of `tables`, the content of gateway.toml.

    `keep`: with metrics, audit and usage, as `tritonforge gateway` has them.
    """
    file = folder / "keys.json"
    keys = {tenant: create_key(file, tenant)[1] for tenant in tenants}
    listener = listen("127.0.0.1", 0)
    made: dict[str, Any] = {}
    ready = threading.Event()

    async def main() -> None:
        config = GatewayConfig.of_tables(tables or {})
        models = {MODEL: (model_info(release, MODEL), (triton,))} if triton else models_of(config.routing)
        metrics = EdgeMetrics()
        router = AliasRouter(config.routing, models, metrics)
        made["edge"], made["loop"] = make_edge(config, KeyStore(file), router, metrics), asyncio.get_running_loop()
        if keep:
            keep_records(made["edge"])
        made["server"] = http_server(made["edge"])
        ready.set()
        await made["server"].serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(START_S)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    gateway = Gateway(url, keys, file, made["edge"], made["loop"], made["server"])
    made["edge"].observers = (*made["edge"].observers, gateway.observe)
    try:
        yield gateway
    finally:
        made["server"].should_exit = True
        thread.join(START_S)

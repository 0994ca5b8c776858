"""Sets up what is kept of requests: metrics, audit, usage. The command `tritonforge gateway` calls it at its start."""

import logging
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tritonforge.errors import SetupError
from tritonforge.gateway.accounting.audit import AuditFiles
from tritonforge.gateway.accounting.background import Background
from tritonforge.gateway.accounting.config import state_folder
from tritonforge.gateway.accounting.records import Record
from tritonforge.gateway.accounting.usage import UsageFile
from tritonforge.gateway.accounting.usage_command import usage_file
from tritonforge.gateway.edge import Edge
from tritonforge.gateway.routing.alias_router import AliasRouter

log = logging.getLogger(__name__)


def keep_records(edge: Edge) -> None:
    """Let metrics, audit and usage observe the edge, as its configuration says.

    Raises SetupError for a place that was configured and cannot be written; the built-in one is done without, and the
    log says so.
    """
    config = edge.config.records
    _ = config.metrics.token  # said at the start, not at the first scrape
    if isinstance(edge.router, AliasRouter):
        edge.metrics.watch(edge.router, lambda: len(edge.open))
    writers: list[Background[Record]] = []
    if config.audit.enabled:
        folder = Path(config.audit.folder) if config.audit.folder else state_folder() / "audit"
        make: Callable[[], Any] = partial(AuditFiles, folder, config.audit.retention_days)
        writers += _writer("audit", make, folder, edge, configured=config.audit.folder is not None)
    if config.usage.enabled:
        file = usage_file(config.usage.file)
        make = partial(UsageFile, file, config.prices, config.usage.retention_days)
        writers += _writer("usage", make, file, edge, configured=config.usage.file is not None)
    edge.observers = (*edge.observers, edge.metrics.observe, *(writer.put for writer in writers))
    edge.closers = (*edge.closers, *(writer.close for writer in writers))


def trace(edge: Edge, endpoint: str | None, ratio: float, exporter: Any = None) -> None:
    """Let spans of the edge be sent to an OTLP collector, if there is one; `ratio` as in Observation.

    Raises SetupError when OpenTelemetry is not installed, which nothing else needs.
    """
    if endpoint is None:
        return
    try:
        from tritonforge.gateway.accounting.spans import EdgeSpans
    except ImportError as error:
        remedy = "run `pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http`"
        raise SetupError(f"traces need OpenTelemetry: {error}; {remedy}") from None
    spans = EdgeSpans(endpoint, exporter)
    edge.trace_ratio = ratio
    edge.observers = (*edge.observers, spans.observe)
    edge.closers = (*edge.closers, spans.close)


def _writer(
    what: str, make: Callable[[], Any], path: Path, edge: Edge, *, configured: bool
) -> list[Background[Record]]:
    try:
        kept = make()
    except (OSError, sqlite3.Error) as error:
        if configured:
            raise SetupError(f"{path} of [{what}] cannot be written: {error}; choose another place") from None
        log.warning("no %s is kept: %s cannot be written (%s); choose a place in [%s]", what, path, error, what)
        return []
    writer: Background[Record] = Background(what, kept.write, partial(edge.metrics.lost, what))
    edge.metrics.writes(what, lambda: writer.delay_s)
    return [writer]

"""A listener of its own for the edge's metrics, as Triton has one: `tritonforge gateway --metrics-port` opens it.

Whoever reaches it may read; no path of the API leads there, so no proxy in front of the API shows it by mistake.
"""

import contextlib
from collections.abc import Iterator

from prometheus_client import start_http_server

from tritonforge.errors import SetupError
from tritonforge.gateway.accounting.edge_metrics import EdgeMetrics
from tritonforge.launch.ports import reachable


@contextlib.contextmanager
def metrics_server(metrics: EdgeMetrics, address: str, port: int | None) -> Iterator[str | None]:
    """Serve them from a thread; gives the URL, None without a port (0: a free one). Raises SetupError."""
    if port is None:
        yield None
        return
    try:
        server, thread = start_http_server(port, address, metrics.registry)
    except OSError as error:
        remedy = "free it or choose another with --metrics-port"
        raise SetupError(f"cannot listen on port {port} of {address}: {error.strerror}; {remedy}") from error
    try:
        yield f"http://{reachable(address)}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

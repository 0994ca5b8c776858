"""The metric families of the service's health: ready or not and why, signs of life, restarts. Listed in metrics.py."""

import json
import os

from tritonforge.launch.drain import taken_back
from tritonforge.observation.health import REASONS
from tritonforge.observation.metric_family import MetricFamily, View, one_label

RESTARTS_VARIABLE = "TRITONFORGE_RESTARTS"
"""Environment variable of tritonserver and its stubs: how often the supervisor replaced the server, a JSON object."""
RESTART_CAUSES = (
    "server_ended",
    "stub_died",
    "stub_halted",
    "server_halted",
    "step_hung",
    "release_changed",
    "load_failed",
)


def restarts() -> dict[str, int]:
    """How often this server was replaced so far, by cause; nothing where no supervisor started it."""
    counted = json.loads(os.environ.get(RESTARTS_VARIABLE, "{}"))
    return {cause: counted.get(cause, 0) for cause in RESTART_CAUSES}


def _not_ready(view: View) -> dict[tuple[str, ...], float]:
    reasons = view.health.reasons
    return {(reason,): float(reason in reasons) for reason in REASONS}


HEALTH_FAMILIES = (
    MetricFamily(
        "tritonforge_ready",
        "gauge",
        "1 while a new request would be taken in, else 0",
        "boolean",
        "health",
        read=lambda view: float(not view.health.reasons),
    ),
    MetricFamily(
        "tritonforge_not_ready",
        "gauge",
        "1 for each reason why a new request would not be taken in now, else 0",
        "boolean",
        "health",
        labels=("reason",),
        values=one_label(*REASONS),
        read=_not_ready,
    ),
    MetricFamily(
        "tritonforge_heartbeat_timestamp_seconds",
        "gauge",
        "When the decoder's process was last seen alive, Unix time",
        "seconds",
        "health",
        read=lambda view: view.health.seen_s,
    ),
    MetricFamily(
        "tritonforge_last_token_timestamp_seconds",
        "gauge",
        "When a step last brought a token, Unix time; 0: never",
        "seconds",
        "health",
        read=lambda view: view.health.last_token_s,
    ),
    MetricFamily(
        "tritonforge_process_start_time_seconds",
        "gauge",
        "When the decoder's process began to serve, Unix time",
        "seconds",
        "health",
        read=lambda view: view.health.started_s,
    ),
    MetricFamily(
        "tritonforge_restarts_total",
        "counter",
        "Times that the supervisor replaced the server, by cause; it goes on counting over the servers that it starts",
        "restarts",
        "health",
        labels=("cause",),
        values=one_label(*RESTART_CAUSES),
        read=lambda view: {(cause,): count for cause, count in RESTARTS.items()},
    ),
    MetricFamily(
        "tritonforge_canaries_given_up_total",
        "counter",
        "Canaries that the supervisor took back because their files were changed while they were served",
        "canaries",
        "health",
        read=lambda view: float(taken_back()),
    ),
)
RESTARTS = restarts()

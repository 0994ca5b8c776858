"""The metric families of the decoder, in one place: name, kind, meaning, and where each value is read from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tritonforge.loop import EngineLoop


@dataclass(frozen=True)
class MetricFamily:
    """A Prometheus family without labels of its own; `read` gives a gauge's value, or a counter's total so far."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    read: Callable[[EngineLoop], float]


FAMILIES = (
    MetricFamily(
        "tritonforge_num_requests_running",
        "gauge",
        "Requests in the running batch",
        lambda loop: loop.scheduler.num_running,
    ),
    MetricFamily(
        "tritonforge_num_requests_waiting",
        "gauge",
        "Requests in the queue",
        lambda loop: loop.scheduler.num_waiting,
    ),
    MetricFamily(
        "tritonforge_kv_blocks_free",
        "gauge",
        "KV blocks that no request holds",
        lambda loop: loop.scheduler.blocks.num_free,
    ),
    MetricFamily(
        "tritonforge_kv_blocks",
        "gauge",
        "KV blocks of the pool",
        lambda loop: loop.scheduler.blocks.num_blocks,
    ),
    MetricFamily(
        "tritonforge_generation_tokens_total",
        "counter",
        "Tokens sampled",
        lambda loop: loop.scheduler.num_generated_tokens,
    ),
    MetricFamily(
        "tritonforge_num_preemptions_total",
        "counter",
        "Requests sent back to the queue to make room",
        lambda loop: loop.scheduler.num_preemptions,
    ),
    MetricFamily(
        "tritonforge_kv_cache_usage_ratio",
        "gauge",
        "Share of the KV blocks that requests hold, in [0, 1]",
        lambda loop: loop.scheduler.kv_cache_usage,
    ),
    MetricFamily(
        "tritonforge_prefix_cache_query_tokens_total",
        "counter",
        "Prompt tokens looked up in the prefix cache",
        lambda loop: loop.scheduler.num_prefix_queries,
    ),
    MetricFamily(
        "tritonforge_prefix_cache_hit_tokens_total",
        "counter",
        "Prompt tokens found in the prefix cache, and not computed again",
        lambda loop: loop.scheduler.num_prefix_hits,
    ),
    MetricFamily(
        "tritonforge_draft_tokens_total",
        "counter",
        "Tokens guessed by prompt lookup",
        lambda loop: loop.scheduler.num_draft_tokens,
    ),
    MetricFamily(
        "tritonforge_accepted_draft_tokens_total",
        "counter",
        "Guessed tokens that came true",
        lambda loop: loop.scheduler.num_accepted_tokens,
    ),
    MetricFamily(
        "tritonforge_num_requests_refused_total",
        "counter",
        "Requests refused or pushed out of the full queue",
        lambda loop: sum(loop.scheduler.num_refused.values()),
    ),
)

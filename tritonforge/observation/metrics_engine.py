"""The metric families of the engine: its batch and queue, KV blocks, drafts and steps. Listed in metrics.py."""

from collections.abc import Callable

from tritonforge.observation.metric_family import Area, MetricFamily, View, one_label
from tritonforge.scheduling.scheduler import Scheduler

WAITING_REASONS = ("seats", "kv_blocks", "token_budget", "preempted")


def _of(name: str) -> Callable[[View], float]:
    """An attribute of the scheduler."""
    return lambda view: getattr(view.loop.scheduler, name)


def _gauge(name: str, what: str, unit: str, area: Area, read: Callable[[View], float], vllm: str = "") -> MetricFamily:
    return MetricFamily(f"tritonforge_{name}", "gauge", what, unit, area, vllm, read=read)


def _counter(name: str, what: str, unit: str, area: Area, source: str, vllm: str = "") -> MetricFamily:
    return MetricFamily(f"tritonforge_{name}_total", "counter", what, unit, area, vllm, read=_of(source))


def _steps(name: str, what: str, unit: str, bins: str, area: Area = "engine", vllm: str = "") -> MetricFamily:
    return MetricFamily(f"tritonforge_{name}", "histogram", what, unit, area, vllm, bins=bins)


def _waiting(view: View) -> dict[tuple[str, ...], float]:
    return {(reason,): count for reason, count in waiting_by_reason(view.loop.scheduler).items()}


def waiting_by_reason(scheduler: Scheduler) -> dict[str, int]:
    """Waiting requests by what they wait for; a request that was preempted once waits as `preempted`.

    The others are held up by what holds up the first of them: no seat in the batch is free, the last step spent its
    whole token budget, or else blocks are short.
    """
    preempted = min(scheduler.waiting.num_preempted, scheduler.num_waiting)
    if scheduler.num_running >= scheduler.config.max_num_seqs:
        held_up_by = "seats"
    else:
        held_up_by = "token_budget" if scheduler.budget_was_spent else "kv_blocks"
    counts = dict.fromkeys(WAITING_REASONS, 0)
    counts["preempted"] = preempted
    counts[held_up_by] += scheduler.num_waiting - preempted
    return counts


QUEUE = (
    _gauge(
        "num_requests_running",
        "Requests in the running batch",
        "requests",
        "requests",
        _of("num_running"),
        "vllm:num_requests_running",
    ),
    _gauge(
        "num_requests_waiting",
        "Requests in the queue",
        "requests",
        "requests",
        _of("num_waiting"),
        "vllm:num_requests_waiting",
    ),
    MetricFamily(
        "tritonforge_num_requests_waiting_by_reason",
        "gauge",
        "Requests in the queue, by what they wait for",
        "requests",
        "requests",
        "vllm:num_requests_waiting_by_reason",
        labels=("reason",),
        values=one_label(*WAITING_REASONS),
        read=_waiting,
    ),
    _gauge(
        "queue_usage_ratio",
        "Share of the queue that is taken, of its requests or its prompt tokens; from 1 on newcomers are refused",
        "ratio",
        "requests",
        lambda view: view.loop.scheduler.waiting.usage,
    ),
    _counter(
        "num_preemptions",
        "Requests sent back to the queue to make room",
        "requests",
        "kv cache",
        "num_preemptions",
        "vllm:num_preemptions_total",
    ),
)

KV_CACHE = (
    _gauge(
        "kv_blocks", "KV blocks of the pool", "blocks", "kv cache", lambda view: view.loop.scheduler.blocks.num_blocks
    ),
    _gauge(
        "kv_blocks_free",
        "KV blocks that no request holds",
        "blocks",
        "kv cache",
        lambda view: view.loop.scheduler.blocks.num_free,
    ),
    _gauge(
        "kv_cache_usage_ratio",
        "Share of the KV blocks that requests hold, in [0, 1]",
        "ratio",
        "kv cache",
        _of("kv_cache_usage"),
        "vllm:kv_cache_usage_perc",
    ),
    _counter(
        "prefix_cache_query_tokens",
        "Prompt tokens looked up in the prefix cache",
        "tokens",
        "kv cache",
        "num_prefix_queries",
        "vllm:prefix_cache_queries_total",
    ),
    _counter(
        "prefix_cache_hit_tokens",
        "Prompt tokens found in the prefix cache, and not computed again",
        "tokens",
        "kv cache",
        "num_prefix_hits",
        "vllm:prefix_cache_hits_total",
    ),
)

GENERATION = (
    _counter(
        "generation_tokens",
        "Tokens sampled, also those that no client was told of",
        "tokens",
        "tokens",
        "num_generated_tokens",
        "vllm:generation_tokens_total",
    ),
    _counter(
        "drafts",
        "Times that tokens were guessed by prompt lookup",
        "steps",
        "speculation",
        "num_drafts",
        "vllm:spec_decode_num_drafts_total",
    ),
    _counter(
        "draft_tokens",
        "Tokens guessed by prompt lookup",
        "tokens",
        "speculation",
        "num_draft_tokens",
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    _counter(
        "accepted_draft_tokens",
        "Guessed tokens that came true",
        "tokens",
        "speculation",
        "num_accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens_total",
    ),
)

STEPS = (
    _steps(
        "inter_token_latency_seconds",
        "Between two steps that brought tokens to a request",
        "seconds",
        "inter_token",
        "latency",
        "vllm:inter_token_latency_seconds",
    ),
    _steps("step_seconds", "A step, from its planning to the passing on of its tokens", "seconds", "step_seconds"),
    _steps("step_outside_engine_ratio", "Share of a step that the engine did not compute", "ratio", "outside_engine"),
    _steps("step_requests", "Requests in a step: the batch size", "requests", "step_requests"),
    _steps("step_tokens", "Tokens computed by a step", "tokens", "step_tokens", vllm="vllm:iteration_tokens_total"),
)

ENGINE_FAMILIES = (*QUEUE, *KV_CACHE, *GENERATION, *STEPS)

"""The metric families of requests: how they ended, what they took, how long they were. Listed in metrics.py."""

from collections.abc import Callable

from tritonforge.errors import STATUS
from tritonforge.observation.metric_family import MetricFamily, View, one_label
from tritonforge.observation.request_record import REASONS, RequestRecord

REJECTIONS = ("never_fits", "queue_full", "pushed_out", "queue_timeout", "draining", "invalid")


def _phase(*names: str) -> Callable[[RequestRecord], float | None]:
    """Seconds of these phases together, of a request that ended well."""

    def read(record: RequestRecord) -> float | None:
        return sum(record.statistics[name] for name in names) / 1e6 if record.answered else None

    return read


def _mean(phase: str, count: Callable[[RequestRecord], int]) -> Callable[[RequestRecord], float | None]:
    def read(record: RequestRecord) -> float | None:
        divisor = count(record) if record.answered else 0
        return record.statistics[phase] / 1e6 / divisor if divisor > 0 else None

    return read


def _size(name: str) -> Callable[[RequestRecord], float | None]:
    def read(record: RequestRecord) -> float | None:
        return record.statistics[name] if record.answered else None

    return read


def _stall(record: RequestRecord) -> float | None:
    return record.longest_gap_us / 1e6 if record.answered and record.longest_gap_us is not None else None


def _rejected(view: View) -> dict[tuple[str, ...], float]:
    refused, rejected = view.loop.scheduler.num_refused, view.recorder.rejected
    return {(reason,): refused[reason.replace("_", " ")] + rejected[reason] for reason in REJECTIONS}


def _latency(name: str, what: str, observe: Callable[[RequestRecord], float | None], vllm: str = "") -> MetricFamily:
    return MetricFamily(f"tritonforge_{name}_seconds", "histogram", what, "seconds", "latency", vllm, observe=observe)


FINISHED = "tritonforge_num_requests_finished_total"

OUTCOMES = (
    MetricFamily(
        FINISHED,
        "counter",
        "Requests that were begun and ended, by reason",
        "requests",
        "requests",
        "vllm:request_success_total",
        labels=("finish_reason",),
        values=one_label(*REASONS),
        read=lambda view: {(reason,): view.recorder.finished[reason] for reason in REASONS},
    ),
    MetricFamily(
        "tritonforge_request_errors_total",
        "counter",
        "Requests answered with an error, by its code",
        "requests",
        "requests",
        labels=("code",),
        values=one_label(*STATUS),
        read=lambda view: {(code,): view.recorder.errors[code] for code in STATUS},
    ),
    MetricFamily(
        "tritonforge_requests_rejected_total",
        "counter",
        "Requests that were not begun, by reason",
        "requests",
        "requests",
        labels=("reason",),
        values=one_label(*REJECTIONS),
        read=_rejected,
    ),
    MetricFamily(
        "tritonforge_num_requests_refused_total",
        "counter",
        "Requests that could never fit, found the queue full or were pushed out of it",
        "requests",
        "requests",
        read=lambda view: sum(view.loop.scheduler.num_refused.copy().values()),
    ),
    MetricFamily(
        "tritonforge_tenant_requests_finished_total",
        "counter",
        "Requests that were begun and ended, by tenant and reason; the first 16 tenants have series of their own",
        "requests",
        "requests",
        labels=("tenant", "finish_reason"),
        read=lambda view: view.recorder.tenant_finished.copy(),
    ),
    MetricFamily(
        "tritonforge_probes_total",
        "counter",
        "Requests that only asked whether the service is alive; they are in no other count of requests",
        "requests",
        "health",
        read=lambda view: view.recorder.num_probes,
    ),
)

TOKENS = (
    MetricFamily(
        "tritonforge_prompt_tokens_total",
        "counter",
        "Prompt tokens of requests that ended with stop, length or cancelled",
        "tokens",
        "tokens",
        "vllm:prompt_tokens_total",
        read=lambda view: view.recorder.tokens["prompt"],
    ),
    MetricFamily(
        "tritonforge_completion_tokens_total",
        "counter",
        "Tokens told to the clients of these requests",
        "tokens",
        "tokens",
        read=lambda view: view.recorder.tokens["completion"],
    ),
    MetricFamily(
        "tritonforge_cached_tokens_total",
        "counter",
        "Prompt tokens of these requests that were in the prefix cache, and not computed",
        "tokens",
        "tokens",
        "vllm:prompt_tokens_cached_total",
        read=lambda view: view.recorder.tokens["cached"],
    ),
    MetricFamily(
        "tritonforge_tenant_tokens_total",
        "counter",
        "Prompt and completion tokens of these requests, by tenant",
        "tokens",
        "tokens",
        labels=("tenant", "kind"),
        read=lambda view: view.recorder.tenant_tokens.copy(),
    ),
)

DURATIONS = (
    _latency(
        "ttft",
        "From arrival at the decoder to the first response handed to Triton",
        _phase("queue_us", "prefill_us", "first_emit_us"),
        "vllm:time_to_first_token_seconds",
    ),
    _latency(
        "tpot",
        "Decode time over tokens after the first",
        _mean("decode_us", lambda record: record.statistics["completion_tokens"] - 1),
        "vllm:request_time_per_output_token_seconds",
    ),
    _latency(
        "e2e",
        "From arrival at the decoder to the last token",
        _phase("queue_us", "prefill_us", "decode_us"),
        "vllm:e2e_request_latency_seconds",
    ),
    _latency("max_stall", "The longest time between two responses", _stall),
    _latency("queue", "Time in the queue", _phase("queue_us"), "vllm:request_queue_time_seconds"),
    _latency("prefill", "From admission to the first token", _phase("prefill_us"), "vllm:request_prefill_time_seconds"),
    _latency("first_emit", "From the first token to the first response", _phase("first_emit_us")),
    _latency("decode", "From the first token to the last one", _phase("decode_us"), "vllm:request_decode_time_seconds"),
    _latency(
        "decode_step",
        "Mean decode step of a request",
        _mean("decode_us", lambda record: record.statistics["decode_steps"]),
    ),
)

LENGTHS = (
    MetricFamily(
        "tritonforge_request_prompt_tokens",
        "histogram",
        "Prompt tokens of a request",
        "tokens",
        "tokens",
        "vllm:request_prompt_tokens",
        observe=_size("prompt_tokens"),
    ),
    MetricFamily(
        "tritonforge_request_generation_tokens",
        "histogram",
        "Tokens told to the client of a request; with n > 1 those of all answers",
        "tokens",
        "tokens",
        "vllm:request_generation_tokens",
        observe=_size("completion_tokens"),
    ),
)

REQUEST_FAMILIES = (*OUTCOMES, *TOKENS, *DURATIONS, *LENGTHS)

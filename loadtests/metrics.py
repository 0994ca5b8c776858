"""One formula per metric, over one record or over many, in integer nanoseconds. "No value" is None and never 0.

Contracts name these metrics; the verdict, the report and the Locust charts all use these functions and no others.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtests.records import CANCELLED, CENSORED, OK, TIMEOUT, Record

DURATION, RATIO, RATE = "duration", "ratio", "rate"
MEAN, COUNT, FACT, COMPARISON, AVAILABILITY = "mean", "count", "fact", "comparison", "availability"
MS = 1_000_000


def ttft_ns(record: Record) -> int | None:
    """Time to first token: arrival of the first response with at least one token, minus the SCHEDULED time."""
    return record.chunks[0][0] - record.scheduled_ns if record.chunks else None


def e2e_ns(record: Record) -> int | None:
    """End to end: arrival of the last response with at least one token, minus the SCHEDULED time."""
    return record.chunks[-1][0] - record.scheduled_ns if record.chunks else None


def tpot_ns(record: Record) -> int | None:
    """Time per output token: (last token - first token) // (tokens - 1).

    None for a single token, and when all tokens came in one response: then there is no interval to measure.
    """
    if len(record.chunks) < 2 or record.received_tokens < 2:
        return None
    return (record.chunks[-1][0] - record.chunks[0][0]) // (record.received_tokens - 1)


def max_stall_ns(record: Record) -> int | None:
    """The longest gap between two consecutive responses with tokens; None when there are fewer than two."""
    times = [at for at, _ in record.chunks]
    return max((after - before for before, after in itertools.pairwise(times)), default=None)


def client_delay_ns(record: Record) -> int | None:
    """How late the client first sent it: sent minus scheduled. Part of every latency, limited by the measurement."""
    if record.sent_ns is None:
        return None
    return (record.attempts[0][0] if record.attempts else record.sent_ns) - record.scheduled_ns


def _phase_ns(name: str) -> Callable[[Record], int | None]:
    def phase(record: Record) -> int | None:
        return None if record.statistics is None else record.statistics[name] * 1000

    phase.__doc__ = f"The server's own {name} of this request, from its last response."
    return phase


queue_ns = _phase_ns("queue_us")
prefill_ns = _phase_ns("prefill_us")
first_emit_ns = _phase_ns("first_emit_us")
decode_ns = _phase_ns("decode_us")


def decode_step_ns(record: Record) -> int | None:
    """The server's mean decode step: decode_us / decode_steps; None without decode steps."""
    if record.statistics is None or record.statistics["decode_steps"] < 1:
        return None
    return record.statistics["decode_us"] * 1000 // record.statistics["decode_steps"]


def residual_ttft_ns(record: Record) -> int | None:
    """Sent to first token, minus queue + prefill + first emit of the server: network, front end, client.

    Negative means that clocks or definitions are wrong.
    """
    if record.statistics is None or record.sent_ns is None or not record.chunks:
        return None
    served = sum(record.statistics[name] for name in ("queue_us", "prefill_us", "first_emit_us")) * 1000
    return record.chunks[0][0] - record.sent_ns - served


def residual_e2e_ns(record: Record) -> int | None:
    """Sent to last token, minus queue + prefill + decode of the server. Negative means the same as above.

    A cancelled request decodes until the cancel is carried out, which its last response tells, often without a token.
    """
    if record.statistics is None or record.sent_ns is None or not record.chunks:
        return None
    served = sum(record.statistics[name] for name in ("queue_us", "prefill_us", "decode_us")) * 1000
    ended_ns = record.end_ns if record.status == CANCELLED else record.chunks[-1][0]
    return ended_ns - record.sent_ns - served


def cancel_to_end_ns(record: Record) -> int | None:
    """From asking to cancel to the last response, which the server sends when it has freed what the request held."""
    return record.end_ns - record.cancel_ns if record.status == CANCELLED else None


def tokens_after_cancel(record: Record) -> int | None:
    """Tokens that the server generated beyond those that had come when the client asked to cancel.

    Those on their way count, so it is an upper bound of what was wasted.
    """
    if record.status != CANCELLED or record.statistics is None:
        return None
    had = sum(count for at, count in record.chunks if at <= record.cancel_ns)
    return max(record.statistics["completion_tokens"] - had, 0)


def attempts_of(record: Record) -> tuple[int, int]:
    """(attempts, 1): how often a request was sent in all."""
    return len(record.attempts) + 1, 1


def cached_of(record: Record) -> tuple[int, int] | None:
    """(prompt tokens from the prefix cache, prompt tokens), as the server counts them."""
    return record.statistics and (record.statistics["cached_tokens"], record.statistics["prompt_tokens"])


def is_hung(record: Record) -> bool:
    """Silent until the client gave up: no answer and no error."""
    return record.status in (TIMEOUT, CENSORED)


def is_failed(record: Record) -> bool:
    """Did not end ok, and was not meant to be cancelled."""
    return record.status not in (OK, CANCELLED)


def is_truncated(record: Record) -> bool:
    """A stream that just ended, with neither a final response nor an error."""
    return record.code in ("TRUNCATED", "EMPTY", "WRONG_LENGTH")


def is_generated_twice(record: Record) -> bool:
    """Retried after tokens had come: what the user saw is not one answer."""
    return bool(record.attempts) and any(status == "partial" for _, _, status in record.attempts)


@dataclass(frozen=True)
class Metric:
    """`kind`: how it is judged; `bound` (le or ge): on which side its limit lies; `value`: its formula over a record.

    `scale`: units of `value` in one unit of the limit. `needs`: a key that its objectives have beside the limit.
    `part`: what a profile must have to do for it to mean something.
    """

    kind: str
    bound: str
    value: Callable[[Record], Any] | None = None
    scale: int = MS
    needs: str | None = None
    part: str | None = None

    @property
    def has_quantile(self) -> bool:
        return self.kind in (DURATION, COMPARISON)

    @property
    def is_share(self) -> bool:
        """True when its limit is a share in (0, 1) that samples have to prove."""
        return self.kind in (RATIO, AVAILABILITY)


METRICS = {
    "ttft_ms": Metric(DURATION, "le", ttft_ns),
    "tpot_ms": Metric(DURATION, "le", tpot_ns),
    "max_stall_ms": Metric(DURATION, "le", max_stall_ns),
    "e2e_ms": Metric(DURATION, "le", e2e_ns),
    "queue_ms": Metric(DURATION, "le", queue_ns),
    "prefill_ms": Metric(DURATION, "le", prefill_ns),
    "first_emit_ms": Metric(DURATION, "le", first_emit_ns),
    "decode_step_ms": Metric(DURATION, "le", decode_step_ns),
    "cancel_to_end_ms": Metric(DURATION, "le", cancel_to_end_ns, part="cancel"),
    "tokens_after_cancel": Metric(DURATION, "le", tokens_after_cancel, scale=1, part="cancel"),
    "error_ratio": Metric(RATIO, "le"),
    "compliance_ratio": Metric(RATIO, "ge"),
    "quality_ratio": Metric(RATIO, "ge", part="quality"),
    "availability": Metric(AVAILABILITY, "ge", needs="slices"),
    "output_tokens_per_s": Metric(RATE, "ge"),
    "input_tokens_per_s": Metric(RATE, "ge"),
    "cost_per_million_output_tokens": Metric(RATE, "le"),
    "cost_per_million_input_tokens": Metric(RATE, "le"),
    "attempts_per_request": Metric(MEAN, "le", attempts_of, part="retry"),
    "prefix_hit_ratio": Metric(MEAN, "ge", cached_of),
    "ttft_against_phase": Metric(COMPARISON, "le", ttft_ns, needs="against"),
    "tpot_against_phase": Metric(COMPARISON, "le", tpot_ns, needs="against"),
    "e2e_against_phase": Metric(COMPARISON, "le", e2e_ns, needs="against"),
    "hung_requests": Metric(COUNT, "le", is_hung, scale=1, needs="rate"),
    "failed_requests": Metric(COUNT, "le", is_failed, scale=1, needs="rate"),
    "truncated_without_error": Metric(COUNT, "le", is_truncated, scale=1, needs="rate"),
    "duplicate_generations": Metric(COUNT, "le", is_generated_twice, scale=1, needs="rate", part="retry"),
    "kv_blocks_leaked": Metric(FACT, "le", scale=1),
    "server_rss_growth_mib": Metric(FACT, "le", scale=1),
    "fault_to_answer_ms": Metric(FACT, "le", part="fault"),
    "recovery_s": Metric(FACT, "le", part="fault"),
}
"""error_ratio: issued requests that did not end ok. compliance_ratio (goodput): issued requests that ended ok and met
every duration objective of their phase and tenant. quality_ratio: issued requests whose answer is right. availability:
time slices that were good. output_tokens_per_s: see tokens_in_slices. cost_per_million_*: the price of an hour over the
tokens of an hour at the measured rate. *_against_phase: a quantile over the same quantile in another phase. Facts are
values of this one run, without statistics: see facts."""


def in_unit(metric: Metric, value: float | None) -> float | None:
    """A value in the unit of the metric's limit, to three decimals."""
    return None if value is None else round(value / metric.scale, 3)


def tokens_in_slices(records: Sequence[Record], start_ns: int, end_ns: int, slices: int) -> list[int]:
    """Output tokens of requests that ended ok, counted by arrival time in equal slices of [start_ns, end_ns).

    output_tokens_per_s is their sum over the window's seconds: tokens of failed requests do not count, nor do tokens
    that arrive after the window, so a service that falls behind shows a lower rate.
    """
    counts = [0] * slices
    for record in records:
        if record.status != OK:
            continue
        for at, tokens in record.chunks:
            if start_ns <= at < end_ns:
                counts[(at - start_ns) * slices // (end_ns - start_ns)] += tokens
    return counts


def prompts_in_slices(records: Sequence[Record], start_ns: int, end_ns: int, slices: int) -> list[int]:
    """Prompt tokens of requests that ended ok, counted when their first token came, in the same slices."""
    counts = [0] * slices
    for record in records:
        if record.status == OK and record.chunks and start_ns <= record.chunks[0][0] < end_ns:
            prompt = record.statistics["prompt_tokens"] if record.statistics else record.prompt_tokens
            counts[(record.chunks[0][0] - start_ns) * slices // (end_ns - start_ns)] += prompt
    return counts


def percentile_ns(values: Sequence[int], quantile: float) -> int | None:
    """The smallest value that at least `quantile` of all values do not exceed (nearest rank); None without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = -(-len(ordered) * round(quantile * 1_000_000) // 1_000_000)
    return ordered[max(rank, 1) - 1]


def ms(value_ns: int | None) -> float | None:
    """Milliseconds for people and reports, to the microsecond."""
    return None if value_ns is None else round(value_ns / 1e6, 3)

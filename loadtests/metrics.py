"""One formula per metric, over one record or over many, in integer nanoseconds. "No value" is None and never 0.

Contracts name these metrics; the verdict, the report and the Locust charts all use these functions and no others.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtests.records import OK, Record

DURATION, RATIO, RATE = "duration", "ratio", "rate"


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
    if len(record.chunks) < 2:
        return None
    return (record.chunks[-1][0] - record.chunks[0][0]) // (record.received_tokens - 1)


def max_stall_ns(record: Record) -> int | None:
    """The longest gap between two consecutive responses with tokens; None when there are fewer than two."""
    times = [at for at, _ in record.chunks]
    return max((after - before for before, after in itertools.pairwise(times)), default=None)


def client_delay_ns(record: Record) -> int | None:
    """How late the client sent it: sent minus scheduled. Part of every latency, and limited by the measurement."""
    return None if record.sent_ns is None else record.sent_ns - record.scheduled_ns


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
    """Sent to last token, minus queue + prefill + decode of the server. Negative means the same as above."""
    if record.statistics is None or record.sent_ns is None or not record.chunks:
        return None
    served = sum(record.statistics[name] for name in ("queue_us", "prefill_us", "decode_us")) * 1000
    return record.chunks[-1][0] - record.sent_ns - served


@dataclass(frozen=True)
class Metric:
    """`kind`: how it is judged; `bound` (le or ge): on which side its limit lies; `value`: a duration's formula."""

    kind: str
    bound: str
    value: Callable[[Record], int | None] | None = None


METRICS = {
    "ttft_ms": Metric(DURATION, "le", ttft_ns),
    "tpot_ms": Metric(DURATION, "le", tpot_ns),
    "max_stall_ms": Metric(DURATION, "le", max_stall_ns),
    "e2e_ms": Metric(DURATION, "le", e2e_ns),
    "queue_ms": Metric(DURATION, "le", queue_ns),
    "prefill_ms": Metric(DURATION, "le", prefill_ns),
    "first_emit_ms": Metric(DURATION, "le", first_emit_ns),
    "decode_step_ms": Metric(DURATION, "le", decode_step_ns),
    "error_ratio": Metric(RATIO, "le"),
    "compliance_ratio": Metric(RATIO, "ge"),
    "output_tokens_per_s": Metric(RATE, "ge"),
}
"""error_ratio: issued requests that did not end ok. compliance_ratio (goodput): issued requests that ended ok and met
every duration objective of their phase. output_tokens_per_s: see tokens_in_slices."""


def tokens_in_slices(records: Sequence[Record], start_ns: int, end_ns: int, slices: int) -> list[int]:
    """Tokens of requests that ended ok, counted by arrival time in equal slices of [start_ns, end_ns).

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

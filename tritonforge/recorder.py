"""What finished requests add to the metrics: how they ended, and histograms of their durations.

The emitter's thread records, the metrics thread takes what was recorded: a call into Triton costs more than sending a
token, so no stream waits for one. It knows no Triton type.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tritonforge.errors import NotFound, ReleaseMismatch

VARIABLE = "TRITONFORGE_HISTOGRAM_BUCKETS"
"""Environment variable of tritonserver and its stubs: the file given to `tritonforge serve --histogram-buckets`."""
DEFAULT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SERVICE_FAILURES = ("INTERNAL", "DEADLINE_EXCEEDED")
"""Codes of requests that were accepted and failed; those refused for lack of room have a family of their own."""

Statistics = Mapping[str, int]


@dataclass(frozen=True)
class HistogramFamily:
    """A histogram of seconds over requests that ended well; `value` is microseconds, None: this request has none.

    The second argument of `value` is the longest time between two responses with tokens, in microseconds.
    """

    name: str
    help: str
    value: Callable[[Statistics, float | None], float | None]


def _ratio(total: float, count: int) -> float | None:
    return total / count if count > 0 else None


HISTOGRAMS = (
    HistogramFamily(
        "tritonforge_ttft_seconds",
        "From arrival at the decoder to the first response handed to Triton",
        lambda s, gap: s["queue_us"] + s["prefill_us"] + s["first_emit_us"],
    ),
    HistogramFamily(
        "tritonforge_tpot_seconds",
        "Decode time over tokens after the first",
        lambda s, gap: _ratio(s["decode_us"], s["completion_tokens"] - 1),
    ),
    HistogramFamily(
        "tritonforge_e2e_seconds",
        "From arrival at the decoder to the last token",
        lambda s, gap: s["queue_us"] + s["prefill_us"] + s["decode_us"],
    ),
    HistogramFamily("tritonforge_max_stall_seconds", "The longest time between two responses", lambda s, gap: gap),
    HistogramFamily("tritonforge_queue_seconds", "Time in the queue", lambda s, gap: s["queue_us"]),
    HistogramFamily("tritonforge_prefill_seconds", "From admission to the first token", lambda s, gap: s["prefill_us"]),
    HistogramFamily(
        "tritonforge_first_emit_seconds",
        "From the first token to the first response",
        lambda s, gap: s["first_emit_us"],
    ),
    HistogramFamily(
        "tritonforge_decode_step_seconds",
        "Mean decode step of a request",
        lambda s, gap: _ratio(s["decode_us"], s["decode_steps"]),
    ),
)
FINISHED = "tritonforge_num_requests_finished_total"
REASONS = ("stop", "length", "cancelled", "error")


class Recorder:
    """Takes down finished requests; bounded, so that a metrics thread that stands still costs no memory."""

    def __init__(self, limit: int = 10_000) -> None:
        self._finished: deque[tuple[str, Statistics | None, float | None]] = deque(maxlen=limit)

    def ended(self, reason: str, statistics: Statistics, longest_gap_us: float | None) -> None:
        """A request was answered: stop, length or cancelled."""
        self._finished.append((reason, statistics, longest_gap_us))

    def failed(self, code: str) -> None:
        """A request ended with an error of this code."""
        if code in SERVICE_FAILURES:
            self._finished.append(("error", None, None))
        elif code == "CANCELLED":
            self._finished.append(("cancelled", None, None))

    def take(self) -> tuple[dict[str, int], list[tuple[str, float]]]:
        """What was recorded since the last call: requests by reason, and (family, seconds) to observe."""
        counts: dict[str, int] = {}
        observed: list[tuple[str, float]] = []
        while self._finished:
            reason, statistics, gap = self._finished.popleft()
            counts[reason] = counts.get(reason, 0) + 1
            if reason in ("stop", "length"):
                values = ((family.name, family.value(statistics, gap)) for family in HISTOGRAMS)
                observed += [(name, value / 1e6) for name, value in values if value is not None]
        return counts, observed


def load_buckets() -> dict[str, list[float]]:
    """Upper bounds in seconds by family: DEFAULT_BUCKETS_S, or those of the file that VARIABLE names.

    Raises NotFound or ReleaseMismatch, naming the file, when it is not what `loadtests/export.py` writes.
    """
    buckets = {family.name: list(DEFAULT_BUCKETS_S) for family in HISTOGRAMS}
    if VARIABLE not in os.environ:
        return buckets
    path = Path(os.environ[VARIABLE])
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFound(f"histogram buckets {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ReleaseMismatch(f"histogram buckets {path} are not JSON: {error}") from None
    for name, bounds in given.items() if isinstance(given, dict) else [("it", given)]:
        valid = (
            isinstance(bounds, list) and bounds and all(type(bound) in (int, float) and bound > 0 for bound in bounds)
        )
        if name not in buckets or not valid or sorted(set(bounds)) != bounds:
            rule = "must map families of the decoder to rising bounds in seconds"
            raise ReleaseMismatch(f"histogram buckets {path} {rule}, got {name}: {bounds!r}")
    return buckets | given

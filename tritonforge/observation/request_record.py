"""RequestRecord: what is told of a request that has ended. Metrics, the request log and traces are made of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from tritonforge.errors import DeadlineExceeded, EngineFailure, InvalidRequest, Overloaded, TritonForgeError
from tritonforge.generate_request import GenerateRequest
from tritonforge.launch.probe import PROBE_TENANT
from tritonforge.timeline import Timeline

ERROR = "error"
REASONS = ("stop", "length", "cancelled", ERROR)
SERVICE_FAILURES = (EngineFailure.code, DeadlineExceeded.code)
"""Codes of requests that were accepted and failed; those refused are counted by themselves, see metrics_requests.py."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended; all instants are nanoseconds of the monotonic clock.

    `outcome` is stop, length, cancelled or error, and `error` what the client was told then. Without `asked` the
    request got no further than its options. `statistics` are those of its last response, and None when it failed.
    `longest_gap_us` is the longest time between two responses with tokens, None with fewer than two. `text` is what was
    answered, and empty unless contents are logged.
    """

    outcome: str
    ended_ns: int
    request_id: str = ""
    error: TritonForgeError | None = None
    asked: GenerateRequest | None = None
    timeline: Timeline | None = None
    statistics: Mapping[str, int] | None = None
    longest_gap_us: float | None = None
    text: str = ""

    @property
    def code(self) -> str | None:
        """The error's code."""
        return None if self.error is None else self.error.code

    @property
    def refused(self) -> bool:
        """Whether it was never begun: for want of room, time in the queue, or a rule that it broke."""
        begun = self.timeline is not None and self.timeline.scheduled_ns is not None
        return self.error is not None and not begun

    @property
    def answered(self) -> bool:
        """Whether it ended well; latencies of others would say that failing is fast."""
        return self.outcome in ("stop", "length")

    @property
    def tenant(self) -> str:
        """Whose request it was; "" for the tenant without a name."""
        return "" if self.asked is None else self.asked.tenant

    @property
    def is_probe(self) -> bool:
        """Whether it only asked if the service is alive."""
        return self.tenant == PROBE_TENANT


def rejection(record: RequestRecord) -> str | None:
    """Why a request was not begun: "invalid", "queue_timeout" or "draining".

    None for one that was begun, and for those that the scheduler refuses: it counts them itself.
    """
    if not record.refused or record.error is None:
        return None
    if isinstance(record.error, InvalidRequest):
        return "invalid" if record.asked is None else None
    if not isinstance(record.error, Overloaded):
        return None
    text = str(record.error)
    if "queue_timeout_ms" in text:
        return "queue_timeout"
    return "draining" if any(words in text for words in ("is draining", "has stopped", "loop died")) else None

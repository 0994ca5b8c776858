"""The traceparent of a request: read from its client, handed on to the models with a span of our own. Pure.

Form: https://www.w3.org/TR/trace-context/#traceparent-header
"""

import re
import secrets
from dataclasses import dataclass

_FORM = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)


@dataclass(frozen=True, slots=True)
class Trace:
    """One request's place in a trace: `parent` is the client's span, empty when the trace begins here."""

    trace_id: str
    span_id: str
    parent: str = ""
    flags: str = "00"

    @classmethod
    def of_header(cls, value: str, ratio: float = 0.0) -> "Trace":
        """A child of what the client sent, sampled as that is; when it is absent or malformed a new trace, of which a
        share of `ratio` is sampled: by the id, as OpenTelemetry's TraceIdRatioBased does.
        """
        found = _FORM.fullmatch(value.strip())
        good = (
            found is not None
            and found["version"] != "ff"
            and not (found["version"] == "00" and found["rest"])
            and set(found["trace"]) != {"0"}
            and set(found["span"]) != {"0"}
        )
        if found is None or not good:
            trace_id = secrets.token_hex(16)
            sampled = int(int(trace_id[16:], 16) < round(ratio * 2**64))
            return cls(trace_id, secrets.token_hex(8), flags=f"{sampled:02x}")
        sampled = int(found["flags"], 16) & 1
        return cls(found["trace"], secrets.token_hex(8), found["span"], f"{sampled:02x}")

    @property
    def sampled(self) -> bool:
        """Whether spans are made of it."""
        return self.flags == "01"

    @property
    def traceparent(self) -> str:
        """The header to hand on, and to answer with: our span."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

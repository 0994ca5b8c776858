"""When one request passed from phase to phase, in integer nanoseconds of one monotonic clock, and in how many steps."""

from dataclasses import dataclass

from tritonforge.contract import PHASES


@dataclass(slots=True)
class Timeline:
    """Instants of one request; None: not reached. Only durations leave the process (see contract.PHASES)."""

    arrived_ns: int
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    first_emit_ns: int | None = None
    last_token_ns: int | None = None
    decode_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def sampled(self, now_ns: int, *, drafted: int = 0, accepted: int = 0) -> int | None:
        """A step that ended at `now_ns` sampled tokens: the first ends the prefill, each later one is a decode step.

        `accepted` of the `drafted` guesses that the step verified came true. Returns the time since the step before
        that did so; None with the first, and with the further answers of n > 1 in the same step.
        """
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        before_ns, self.last_token_ns = self.last_token_ns, now_ns
        if self.first_token_ns is None or before_ns is None:
            self.first_token_ns = now_ns
            return None
        if now_ns == before_ns:
            return None
        self.decode_steps += 1
        return now_ns - before_ns

    def phases_us(self, now_ns: int) -> dict[str, int]:
        """Durations of contract.PHASES in microseconds; a phase that a request never left ends at `now_ns`."""
        scheduled = now_ns if self.scheduled_ns is None else self.scheduled_ns
        first_token = now_ns if self.first_token_ns is None else self.first_token_ns
        last_token = first_token if self.last_token_ns is None else self.last_token_ns
        first_emit = now_ns if self.first_emit_ns is None else self.first_emit_ns
        spans = (
            scheduled - self.arrived_ns,
            first_token - scheduled,
            first_emit - first_token,
            last_token - first_token,
        )
        return {name: span // 1000 for name, span in zip(PHASES, spans, strict=True)}

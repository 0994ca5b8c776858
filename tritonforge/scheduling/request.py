"""How far a request is: the Request that the scheduler moves along, and the plan of a step. No clock, no threads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from tritonforge.options import DEFAULT_PRIORITY


class FinishReason(StrEnum):
    """Why a request ended: an end token or stop string, max_tokens, cancellation, or an error."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Phase(Enum):
    """Which of the scheduler's hands holds a request; a new one is in none."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the scheduler: what it owes is num_tokens - num_computed_tokens.

    `key` is unique in the process (a client's request_id need not be). Preemption sets num_computed_tokens back to 0
    and drops the blocks; the tokens stay, so nothing already answered changes.

    `priority` is a class from 0, the most urgent, to 9. Only equal `cache_salt`s share a prefix. To tell a prompt's
    log-probabilities, all of it is computed (`reuse_prefix` False) in chunks of at most `max_chunk` tokens a step.
    Drafts are added where it may `speculate`. A sample of n > 1 names the first one as `parent`. `order` is the
    request's fixed place among all, see admission.py.
    """

    key: int
    prompt_ids: Sequence[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = DEFAULT_PRIORITY
    tenant: str = ""
    arrival_ns: int = 0
    cache_salt: str = ""
    reuse_prefix: bool = True
    max_chunk: int | None = None
    speculate: bool = True
    parent: "Request | None" = None
    order: tuple[int, ...] = ()
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    phase: Phase = Phase.NEW
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start to stop - 1 of prompt followed by output."""
        split = len(self.prompt_ids)
        if start >= split:
            return self.output_ids[start - split : stop - split]
        if stop <= split:
            return list(self.prompt_ids[start:stop])
        return [*self.prompt_ids[start:], *self.output_ids[: stop - split]]


@dataclass(frozen=True, slots=True)
class Work:
    """One request's share of a step: compute `num_new_tokens` from num_computed_tokens on, sample when `samples`.

    The new tokens are known ones of the request, then those of `draft`: guesses at what comes next, to be verified.
    """

    request: Request
    num_new_tokens: int
    samples: bool
    draft: tuple[int, ...] = ()

    @property
    def num_logits(self) -> int:
        """Rows of logits that are sampled: after the last known token, and after each one of the draft."""
        return 1 + len(self.draft) if self.samples else 0

    def token_ids(self) -> list[int]:
        """The token ids to compute, in order; valid until the step is committed."""
        start = self.request.num_computed_tokens
        known = self.request.tokens(start, start + self.num_new_tokens - len(self.draft))
        return [*known, *self.draft]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes, in batch order, and who was preempted to make room for it.

    `copies` are (source, destination) KV blocks, copied in order before anything is computed.
    """

    work: tuple[Work, ...]
    preempted: tuple[Request, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step: at most max_num_batched_tokens."""
        return sum(work.num_new_tokens for work in self.work)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token of a request, and its finish reason when it was the last."""

    request: Request
    token_id: int
    finish_reason: FinishReason | None

"""The Scheduler: which tokens of which requests the next step computes. Pure: values in, values out.

There are no phases, only progress (after vLLM v1): a request owes num_tokens - num_computed_tokens, and each step
spends a token budget on what is owed. So a long prompt is chunked and mixed with decodes, and a preempted request
simply owes its tokens again. The engine loop is the only caller.
"""

from collections import Counter
from collections.abc import Sequence

from tritonforge.errors import InvalidRequest, Overloaded
from tritonforge.scheduling.admission import WaitingQueue
from tritonforge.scheduling.batch import RunningBatch
from tritonforge.scheduling.blocks import BlockManager
from tritonforge.scheduling.planner import Propose, StepPlanner
from tritonforge.scheduling.request import FinishReason, Phase, Request, StepPlan, TokenEvent
from tritonforge.scheduling.scheduler_config import SchedulerConfig

OUTPUT_WEIGHT = 2
"""What an output token costs a tenant, in prompt tokens (the weights of the VTC paper, see admission.py)."""


class Scheduler:
    """Owns the waiting queue, the running batch and the blocks."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, propose: Propose | None = None) -> None:
        self.config = config
        self.blocks = blocks
        self.waiting = WaitingQueue(config.max_waiting, config.max_waiting_tokens, config.ageing_ms * 1_000_000)
        self.running = RunningBatch()
        self.num_generated_tokens = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.budget_was_spent = False
        self.num_refused: Counter[str] = Counter()
        self._planner = StepPlanner(config, blocks, self.waiting, self.running, propose)
        self._tables = self._planner.tables

    @property
    def num_preemptions(self) -> int:
        """Times that a running request went back to the queue."""
        return self._planner.num_preemptions

    @property
    def num_fairness_preemptions(self) -> int:
        """Those of num_preemptions that made way for a tenant under its share, not for want of blocks."""
        return self._planner.num_fairness_preemptions

    @property
    def num_prefix_queries(self) -> int:
        """Prompt tokens that were looked up in the prefix cache, when their requests first started."""
        return self._planner.num_prefix_queries

    @property
    def num_prefix_hits(self) -> int:
        """Those of num_prefix_queries that were found."""
        return self._planner.num_prefix_hits

    @property
    def num_running(self) -> int:
        """Requests in the running batch."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    @property
    def kv_cache_usage(self) -> float:
        """The share of the KV blocks that requests hold, in [0, 1]."""
        return self.blocks.usage

    def add(self, request: Request) -> list[Request]:
        """Queue a new request; returns those that were pushed out for it, which have ended with ERROR.

        Raises InvalidRequest when it can never fit, Overloaded when the queue is full, see WaitingQueue.make_room.
        """
        most = len(request.prompt_ids) + request.max_tokens
        if self.blocks.blocks_for(most) > self.blocks.most_per_request:
            self.num_refused["never fits"] += 1
            raise InvalidRequest(
                f"prompt and max_tokens must fit {self.blocks.most_per_request} KV blocks of {self.blocks.block_size} "
                f"tokens, got {most} tokens"
            )
        try:
            pushed = self.waiting.make_room(request, self.config.max_num_seqs - len(self.running))
        except Overloaded:
            self.num_refused["queue full"] += 1
            raise
        for victim in pushed:
            self.num_refused["pushed out"] += 1
            self.finish(victim, FinishReason.ERROR)
        self.waiting.place(request)
        self.waiting.push(request)
        return pushed

    def fork(self, parent: Request, child: Request) -> None:
        """Queue another sample of the running `parent`: the same prompt, tenant and class, right behind it."""
        child.parent = parent
        self.waiting.place(child)
        self.waiting.push(child)

    def schedule(self) -> StepPlan:
        """Plan the next step: decodes first, then prefill chunks, and drafts with what is left of the budget.

        Tenants take turns at the prefill tokens of a step, see PrefillTurns: a prompt that fits is computed in the step
        that admits it, however long the prompts of others are, when its tenant computed no more than they did.
        """
        plan = self._planner.plan()
        self.budget_was_spent = plan.num_tokens >= self.config.max_num_batched_tokens
        return plan

    def commit(self, plan: StepPlan, sampled: Sequence[Sequence[int] | None]) -> list[TokenEvent]:
        """Record what the step computed: an event for each new token, up to a request's last.

        `sampled` has for each work that samples, in order, the accepted tokens of its draft and the one after them, or
        None when they could not be drawn. That work counts as not done, and so does work of a request that has ended.
        """
        rows = iter(sampled)
        events: list[TokenEvent] = []
        num_tenants = len(self.running.seats)
        for work in plan.work:
            request = work.request
            token_ids = next(rows) if work.samples else ()
            if request.phase is not Phase.RUNNING or token_ids is None:
                continue
            reason = None
            request.num_computed_tokens += work.num_new_tokens - len(work.draft)
            if work.samples:
                reason = self._append(request, token_ids, events)
                self.waiting.charge(request, OUTPUT_WEIGHT * len(token_ids), num_tenants)
            if work.draft:
                self.num_drafts += 1
                self.num_draft_tokens += len(work.draft)
                self.num_accepted_tokens += len(token_ids) - 1
            self._tables.settle(request)
            if reason is not None:
                self.finish(request, reason)
        return events

    def finish(self, request: Request, reason: FinishReason) -> None:
        """The only way out: frees the blocks and fixes the reason. Idempotent."""
        if request.phase is Phase.FINISHED:
            return
        if request.phase is not Phase.NEW:
            (self.running if request.phase is Phase.RUNNING else self.waiting).remove(request)
        self._tables.release(request)
        request.phase, request.finish_reason = Phase.FINISHED, reason

    def _append(self, request: Request, token_ids: Sequence[int], events: list[TokenEvent]) -> FinishReason | None:
        """Append tokens up to the request's last; all but the last one appended are computed already."""
        reason = None
        for position, token_id in enumerate(token_ids):
            request.output_ids.append(token_id)
            request.num_computed_tokens += position > 0
            if token_id in request.stop_token_ids:
                reason = FinishReason.STOP
            elif len(request.output_ids) == request.max_tokens:
                reason = FinishReason.LENGTH
            events.append(TokenEvent(request, token_id, reason))
            if reason is not None:
                break
        self.num_generated_tokens += position + 1
        return reason

    def check_invariants(self) -> None:
        """Assert what must hold between steps; tests call it after each one."""
        assert len(self.running) <= self.config.max_num_seqs
        assert all(request.phase is Phase.RUNNING for request in self.running)
        assert all(request.phase is Phase.WAITING and not request.block_table for request in self.waiting)
        for request in self.running:
            assert len(request.block_table) == self.blocks.blocks_for(request.num_computed_tokens)
            assert request.num_computed_tokens < request.num_tokens
        self.running.check_invariants()
        self.waiting.check_invariants()
        self.blocks.check_invariants(request.block_table for request in self.running)
        self._tables.check_invariants(self.running)

"""The Scheduler: which tokens of which requests the next step computes. Pure: values in, values out.

There are no phases, only progress (after vLLM v1): a request owes num_tokens - num_computed_tokens, and each step
spends a token budget on what is owed, running requests first. So a long prompt is chunked and mixed with decodes, and a
preempted request simply owes its tokens again. The engine loop is the only caller.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tritonforge.blocks import BlockManager, hash_block, hash_blocks
from tritonforge.errors import InvalidRequest, Overloaded
from tritonforge.request import FinishReason, Phase, Request, StepPlan, TokenEvent, Work


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of the queue; each is a positive count (requests, or tokens where the name says so)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    max_waiting_tokens: int

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidRequest(f"scheduler.{name} must be a positive integer, got {value!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidRequest(
                f"scheduler.max_num_batched_tokens must be at least max_num_seqs {self.max_num_seqs}, "
                f"got {self.max_num_batched_tokens}"
            )


class Scheduler:
    """Owns the waiting queue, the running batch and the blocks. Oldest first; the newest is preempted first."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.config = config
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self._waiting_tokens = 0

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

    def add(self, request: Request) -> None:
        """Queue a new request. Raises InvalidRequest when it can never fit, Overloaded when the queue is full."""
        most = len(request.prompt_ids) + request.max_tokens
        if self.blocks.blocks_for(most) > self.blocks.num_blocks:
            raise InvalidRequest(
                f"prompt and max_tokens must fit {self.blocks.num_blocks} KV blocks of {self.blocks.block_size} "
                f"tokens, got {most} tokens"
            )
        self._check_room(request)
        self._enqueue(request, front=False)

    def _check_room(self, request: Request) -> None:
        free_seats = self.config.max_num_seqs - len(self.running)
        if len(self.waiting) >= self.config.max_waiting + free_seats:
            raise Overloaded(
                f"the queue is full: {len(self.waiting)} requests wait, max_waiting is {self.config.max_waiting}"
            )
        tokens = self._waiting_tokens + len(request.prompt_ids)
        if self.waiting and tokens > self.config.max_waiting_tokens:
            raise Overloaded(
                f"the queue is full: {tokens} prompt tokens would wait, max_waiting_tokens is "
                f"{self.config.max_waiting_tokens}"
            )

    def schedule(self) -> StepPlan:
        """Plan the next step: running requests in order, then waiting ones, within budget, seats and blocks."""
        budget = self.config.max_num_batched_tokens
        work: list[Work] = []
        preempted: list[Request] = []
        for request in list(self.running):
            if budget == 0:
                break
            if request.phase is not Phase.RUNNING:
                continue  # preempted above, to make room for an older one
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if self._make_room(request, count, preempted):
                work.append(self._assign(request, count))
                budget -= count
        while budget > 0 and not preempted and self._admit_next():
            request = self.running[-1]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            work.append(self._assign(request, count))
            budget -= count
        return StepPlan(tuple(work), tuple(preempted))

    def commit(self, plan: StepPlan, sampled: Sequence[int | None]) -> list[TokenEvent]:
        """Record what the step computed; `sampled` has one token id for each work that samples, in order.

        What became of a request that was finished since is not recorded; its token may be None.
        """
        tokens = iter(sampled)
        events = []
        for work in plan.work:
            request = work.request
            token_id = next(tokens) if work.samples else None
            if request.phase is Phase.FINISHED:
                continue
            request.num_computed_tokens += work.num_new_tokens
            self._publish_full_blocks(request)
            if token_id is not None:
                events.append(self._append(request, token_id))
        return events

    def finish(self, request: Request, reason: FinishReason) -> None:
        """The only way out: frees the blocks and fixes the reason. Idempotent."""
        if request.phase is Phase.FINISHED:
            return
        if request.phase is Phase.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
            self._waiting_tokens -= len(request.prompt_ids)
        self.blocks.release(request.block_table)
        request.phase, request.finish_reason = Phase.FINISHED, reason

    def _append(self, request: Request, token_id: int) -> TokenEvent:
        request.output_ids.append(token_id)
        self.num_generated_tokens += 1
        reason = None
        if token_id in request.stop_token_ids:
            reason = FinishReason.STOP
        elif len(request.output_ids) == request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.finish(request, reason)
        return TokenEvent(request, token_id, reason)

    def _assign(self, request: Request, count: int) -> Work:
        """Give `request` the blocks for `count` more tokens, which are known to be free."""
        end = request.num_computed_tokens + count
        missing = self.blocks.blocks_for(end) - len(request.block_table)
        request.block_table.extend(self.blocks.allocate(missing))
        return Work(request, count, samples=end == request.num_tokens)

    def _make_room(self, request: Request, count: int, preempted: list[Request]) -> bool:
        """Free blocks for `count` more tokens by preempting the newest; False when that was `request` itself."""
        missing = self.blocks.blocks_for(request.num_computed_tokens + count) - len(request.block_table)
        while missing > self.blocks.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.release(request.block_table)
        request.num_computed_tokens = request.num_published_blocks = 0
        request.preemptions += 1
        self.num_preemptions += 1
        self._enqueue(request, front=True)

    def _enqueue(self, request: Request, *, front: bool) -> None:
        request.phase = Phase.WAITING
        self._waiting_tokens += len(request.prompt_ids)
        if front:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def _admit_next(self) -> bool:
        """Move the head of the queue to running, with the blocks of its cached prefix, if all it owes now would fit."""
        if not self.waiting or len(self.running) == self.config.max_num_seqs:
            return False
        request = self.waiting[0]
        if not request.block_hashes:
            request.block_hashes = hash_blocks(request.prompt_ids, self.blocks.block_size)
        # The last token is always computed: its logits are what the step is for.
        reusable = (request.num_tokens - 1) // self.blocks.block_size
        cached = self.blocks.cached_prefix(request.block_hashes[:reusable])
        if not self.blocks.can_take(cached, self.blocks.blocks_for(request.num_tokens) - len(cached)):
            return False
        self.waiting.popleft()
        self._waiting_tokens -= len(request.prompt_ids)
        self.blocks.take(cached)
        request.block_table.extend(cached)
        request.num_published_blocks = len(cached)
        request.num_computed_tokens = len(cached) * self.blocks.block_size
        if request.preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        request.phase = Phase.RUNNING
        self.running.append(request)
        return True

    def _publish_full_blocks(self, request: Request) -> None:
        size = self.blocks.block_size
        hashes = request.block_hashes
        for index in range(request.num_published_blocks, request.num_computed_tokens // size):
            if index == len(hashes):
                parent = hashes[-1] if hashes else b""
                hashes.append(hash_block(parent, request.tokens(index * size, (index + 1) * size)))
            self.blocks.publish(request.block_table[index], hashes[index])
        request.num_published_blocks = request.num_computed_tokens // size

    def check_invariants(self) -> None:
        """Assert what must hold between steps; tests call it after each one."""
        assert len(self.running) <= self.config.max_num_seqs
        assert all(request.phase is Phase.RUNNING for request in self.running)
        assert all(request.phase is Phase.WAITING and not request.block_table for request in self.waiting)
        assert self._waiting_tokens == sum(len(request.prompt_ids) for request in self.waiting)
        for request in self.running:
            assert len(request.block_table) == self.blocks.blocks_for(request.num_computed_tokens)
            assert request.num_computed_tokens < request.num_tokens
        self.blocks.check_invariants(request.block_table for request in self.running)

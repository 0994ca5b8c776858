"""StepPlanner: fills one step with work. Pure; the Scheduler is the only caller.

Decodes come first, then prefill chunks of running and newly admitted requests, then drafts with what is left.
"""

from collections.abc import Callable, Sequence

from tritonforge.scheduling.admission import WaitingQueue
from tritonforge.scheduling.batch import RunningBatch, Step
from tritonforge.scheduling.block_tables import BlockTables, Prefix
from tritonforge.scheduling.blocks import BlockManager
from tritonforge.scheduling.request import Phase, Request, StepPlan, Work
from tritonforge.scheduling.scheduler_config import SchedulerConfig
from tritonforge.scheduling.turns import PrefillTurns

Propose = Callable[[Request, int], Sequence[int]]
"""Guesses what a request will say next: at most so many token ids, or none."""


class StepPlanner:
    """Moves requests between the queue and the batch, and gives out tokens and blocks.

    Preemption recomputes. When blocks run out, the newest running request gives up its own, by the places that requests
    get when they arrive and keep. So the oldest running one is never the victim and computes something in each step: it
    ends, another is the oldest, and none waits for ever.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        waiting: WaitingQueue,
        running: RunningBatch,
        propose: Propose | None,
    ) -> None:
        self.waiting = waiting
        self.running = running
        self.blocks = blocks
        self.tables = BlockTables(blocks)
        self.num_preemptions = 0
        self.num_fairness_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._config = config
        self._propose = propose
        self._turns = PrefillTurns()
        self._let_pass_before = False
        self._watermark = int(config.watermark * blocks.num_blocks)

    def plan(self) -> StepPlan:
        """The next step."""
        step = Step(self._config.max_num_batched_tokens)
        self._decode(step)
        decodes = tuple(step.work)
        if not step.preempted:
            self._admit(step)
        self._prefill(step)
        self._let_pass(step, decodes)
        if self._propose is not None:
            self._speculate(self._propose, step)
        return step.plan()

    def _decode(self, step: Step) -> None:
        """One token for each running request that owes one; oldest first, so a victim has no work yet."""
        for request in self.running:
            if request.phase is not Phase.RUNNING:
                continue  # preempted above, to make room for an older one
            if request.num_tokens - request.num_computed_tokens > 1:
                step.ask(request, self.tables.num_missing(request, request.num_tokens))
            elif self._make_room(request, request.num_tokens, step):
                self._give(request, 1, step)

    def _admit(self, step: Step) -> None:
        """Start waiting requests while seats, blocks and the budget last.

        A tenant whose prefills fill the step by themselves starts no more, and holds up nobody else.
        """
        while self.waiting and step.budget > 0:
            busy = [tenant for tenant, demand in step.demand.items() if demand >= step.budget]
            request = self.waiting.head(self.running.seats, self._share(), busy)
            if request is None or request in step.preempted:
                return
            prefix = self.tables.find_prefix(request)
            if not self._fits(request, prefix, step) and not self._make_way(request, step):
                return
            self._start(request, prefix, step)

    def _prefill(self, step: Step) -> None:
        """Chunks for the prefills, oldest first, from their tenants' shares of the budget."""
        shares = self._turns.shares(step.demand, step.budget, self.waiting.tenants)
        for request in sorted(step.prefills, key=lambda request: request.order):
            if request.phase is not Phase.RUNNING:
                continue
            count = min(step.prefills[request].num_tokens, shares[request.tenant])
            if count > 0 and self._make_room(request, request.num_computed_tokens + count, step):
                self._give(request, count, step)
                self._turns.charge(request.tenant, count, request.arrival_ns)
                shares[request.tenant] -= count

    def _let_pass(self, step: Step, decodes: Sequence[Request]) -> None:
        """Leave `decodes` of floods out of a step that computes another tenant's prompt, of two steps one at most.

        A step is as long as its batch: the other tenant would wait for the decodes of a full one with each chunk. The
        oldest running request computes something in each step all the same.
        """
        floods = self._turns.floods(self.waiting.tenants)
        passing = any(work.num_new_tokens > 1 and request.tenant not in floods for request, work in step.work.items())
        yielding = [one for one in decodes if one.tenant in floods and one is not self.running.oldest]
        deferred = step.defer(yielding) if passing and not self._let_pass_before else []
        for request in deferred:
            self.tables.settle(request)
        self._let_pass_before = bool(deferred)

    def _speculate(self, propose: Propose, step: Step) -> None:
        """Add drafts to decodes, from the budget that is left and free blocks; while others wait, from their own."""
        spare = 0 if self.waiting else max(0, self.blocks.num_free - self._watermark)
        for request, work in step.work.items():
            if (
                not (request.speculate and work.samples and request.output_ids)
                or work.num_new_tokens > 1
                or not step.budget
            ):
                continue
            room = (len(request.block_table) + spare) * self.blocks.block_size - request.num_tokens
            most = min(step.budget, request.max_tokens - len(request.output_ids) - 1, room)
            draft = tuple(propose(request, most)) if most > 0 else ()
            if draft:
                assert len(draft) <= most, f"a draft of {len(draft)} tokens is longer than {most}"
                held = len(request.block_table)
                self.tables.grow(request, request.num_tokens + len(draft))
                spare -= len(request.block_table) - held
                step.work[request] = Work(request, 1 + len(draft), True, draft)
                step.budget -= len(draft)

    def _give(self, request: Request, count: int, step: Step) -> None:
        """Give `request` the work on `count` more tokens, for whose blocks there is room."""
        end = request.num_computed_tokens + count
        self.tables.grow(request, end)
        step.give(Work(request, count, samples=end == request.num_tokens))

    def _fits(self, request: Request, prefix: Prefix, step: Step) -> bool:
        """Whether there is a seat, and room for all that `request` owes now beside what was promised to others."""
        if len(self.running) == self._config.max_num_seqs:
            return False
        missing = self.blocks.blocks_for(request.num_tokens) - len(prefix.blocks)
        return self.blocks.can_take(prefix.blocks, missing + self._reserve(step))

    def _share(self) -> float:
        """The seats that each tenant would have if all had the same part of the batch."""
        return len(self.running) / len(self.waiting.tenants | self.running.seats.keys())

    def _reserve(self, step: Step) -> int:
        """Blocks that an admission leaves alone; an empty batch leaves none, so any request can run alone."""
        return step.num_promised_blocks + (self._watermark if self.running else 0)

    def _make_way(self, request: Request, step: Step) -> bool:
        """Preempt the newest requests of tenants over their share, for the first start of one whose tenant is under it.

        A tenant's share is an equal part of the running requests. Nobody is left with fewer than the other then has,
        nobody more urgent is preempted, and a request that was preempted itself has to wait: each request does this
        once at most, so requests cannot chase each other.
        """
        seats = dict(self.running.seats)
        mine = seats.get(request.tenant, 0)
        if request.preemptions or mine >= self._share():
            return False
        wanted = self.blocks.blocks_for(request.num_tokens) + self._reserve(step)
        num_free = self.blocks.num_free
        newest = {tenant: self.running.newest_of(tenant) for tenant in seats}
        victims: list[Request] = []
        while len(self.running) - len(victims) == self._config.max_num_seqs or num_free < wanted:
            most = max(seats, key=seats.__getitem__)
            victim = next(newest[most])
            if seats[most] < mine + 2 or victim.priority < request.priority:
                return False
            victims.append(victim)
            seats[most] -= 1
            num_free += self.blocks.num_unshared(victim.block_table)
        for victim in victims:
            self._preempt(victim, step)
        self.num_fairness_preemptions += len(victims)
        return True

    def _make_room(self, request: Request, num_tokens: int, step: Step) -> bool:
        """Free the blocks for the first `num_tokens` by preempting the newest; False when that was `request` itself."""
        while self.tables.num_missing(request, num_tokens) > self.blocks.num_free:
            victim = self.running.newest
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, step: Step) -> None:
        step.preempt(request)
        self.running.remove(request)
        self.tables.release(request)
        request.preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(request)

    def _start(self, request: Request, prefix: Prefix, step: Step) -> None:
        """Move `request` from the queue to the batch, with its prefix."""
        self.waiting.remove(request)
        copy = self.tables.start(request, prefix)
        if copy is not None:
            step.copies[request] = copy
        if request.preemptions == 0:
            request.num_cached_tokens = prefix.num_tokens
            self.waiting.charge(request, len(request.prompt_ids) - prefix.num_tokens, len(self.running.seats))
            if request.reuse_prefix and not prefix.forked:
                self.num_prefix_queries += len(request.prompt_ids)
                self.num_prefix_hits += prefix.num_tokens
        request.phase = Phase.RUNNING
        self.running.add(request)
        if request.num_tokens - request.num_computed_tokens == 1:
            self._give(request, 1, step)
        else:
            step.ask(request, self.tables.num_missing(request, request.num_tokens))

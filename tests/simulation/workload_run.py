"""Runs one random workload on the simulated engine and checks every promise of the scheduler after each step.

Workloads on a linear KV cache run on the logic that the linear engines share. Reproduce one with
`python -m tests.simulation.soak --seed SEED`, and --linear for a linear one.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from slot_engine import SlotEngine
from workloads import VOCAB, Job, Workload

from tritonforge.engines.base import Engine, EngineSpec, SequenceStep
from tritonforge.engines.linear_calls import CallLimits
from tritonforge.engines.simulated import SimulatedEngine, logits_of
from tritonforge.errors import InvalidRequest, Overloaded
from tritonforge.scheduling.blocks import BlockManager
from tritonforge.scheduling.request import FinishReason, Phase, Request, StepPlan
from tritonforge.scheduling.scheduler import Scheduler

MAX_STEPS = 3000
STEP_NS = 1_000_000


def alone(prompt: Sequence[int], max_tokens: int, stops: frozenset[int], sample: int) -> list[int]:
    """What sample number `sample` of a request says when it runs alone: a function of its tokens and nothing else."""
    context = list(prompt)
    while len(context) < len(prompt) + max_tokens:
        context.append(choose(logits_of([context], VOCAB)[0].argmax(), sample))
        if context[-1] in stops:
            break
    return context[len(prompt) :]


def choose(best: int, sample: int) -> int:
    """The token that sample number `sample` takes where `best` is the likeliest: samples must differ."""
    return (int(best) + sample) % VOCAB


def engine_of(workload: Workload) -> Engine:
    """The engine of the workload's KV layout; calls of a linear one are as various as the workloads are."""
    if not workload.linear:
        return SimulatedEngine(EngineSpec(VOCAB, 64, workload.block_size, workload.num_blocks))
    rng = random.Random(f"calls {workload.seed}")
    limits = CallLimits(
        views=rng.choice(((64,), (8, 16, 32, 64))),
        max_tokens=rng.choice((5, 40)),
        max_wide_rows=rng.choice((1, 3)),
        max_logit_rows=rng.choice((2, 40)),
        narrow_tokens=rng.choice((1, 4, 16)),
        widths=rng.choice(((), (8, 16))),
        call_cost=rng.choice((0, 4, 100)),
    )
    return SlotEngine(EngineSpec(VOCAB, workload.block_size, workload.block_size, workload.num_blocks), limits)


@dataclass(eq=False)
class Run:
    """A workload on its way through a scheduler and the simulated engine; `run` is all there is to call."""

    workload: Workload
    tally: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        workload = self.workload
        self.rng = random.Random(~workload.seed)
        self.engine = engine_of(workload)
        blocks = BlockManager(workload.num_blocks, workload.block_size, linear=workload.linear)
        self.scheduler = Scheduler(workload.config, blocks, self.propose if workload.speculates else None)
        self.jobs: dict[Request, Job] = {}
        self.sample_of: dict[Request, int] = {}
        self.expected: dict[Request, list[int]] = {}
        self.told: dict[Request, list[int]] = {}
        self.ends: dict[Request, str] = {}

    def run(self) -> Counter[str]:
        """Run to the end, checking everything; returns how often each feature was met."""
        last_arrival = max(job.arrives_at for job in self.workload.jobs)
        for step in range(MAX_STEPS):
            self.arrive(step)
            self.cancel(step)
            if not self.scheduler.has_work and step >= last_arrival:
                self.check_end()
                return self.tally
            self.step()
            self.scheduler.check_invariants()
        raise AssertionError("the workload does not end: a request starves")

    def arrive(self, step: int) -> None:
        for job in self.workload.jobs:
            if job.arrives_at == step:
                request = self.make(job, 0)
                try:
                    pushed = self.scheduler.add(request)
                except (Overloaded, InvalidRequest) as error:
                    self.end(request, type(error).__name__)
                    continue
                for victim in pushed:
                    assert victim.finish_reason is FinishReason.ERROR and victim.tenant != job.tenant
                    assert not victim.output_ids, "a request that had started was pushed out"
                    self.end(victim, "pushed out")

    def make(self, job: Job, sample: int) -> Request:
        request = Request(
            len(self.jobs),
            job.prompt,
            job.max_tokens,
            job.stops,
            priority=job.priority,
            tenant=job.tenant,
            arrival_ns=job.arrives_at * STEP_NS,
            cache_salt=job.salt,
            reuse_prefix=job.reuse_prefix or sample > 0,
            max_chunk=job.max_chunk,
        )
        self.jobs[request], self.sample_of[request], self.told[request] = job, sample, []
        self.expected[request] = alone(job.prompt, job.max_tokens, job.stops, sample)
        return request

    def cancel(self, step: int) -> None:
        for request, job in self.jobs.items():
            if job.cancel_at is not None and job.cancel_at <= step and request not in self.ends:
                self.scheduler.finish(request, FinishReason.CANCELLED)
                self.scheduler.finish(request, FinishReason.ERROR)  # idempotent: the first reason stays
                assert request.finish_reason is FinishReason.CANCELLED
                self.end(request, "cancelled")

    def propose(self, request: Request, most: int) -> list[int]:
        """A draft that is right as often as the workload says, and sometimes empty or short."""
        assert most >= 1 and request.phase is Phase.RUNNING
        start = len(request.output_ids)
        truth = self.expected[request][start : start + self.rng.randrange(most + 1)]
        quality = self.workload.draft_quality
        return [token if self.rng.random() < quality else self.rng.randrange(VOCAB) for token in truth]

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        self.engine.copy_blocks(plan.copies)
        self.tally["copies"] += len(plan.copies)
        if self.rng.random() < self.workload.failing_steps:
            for work in plan.work:
                self.fail(work.request, "failed step")
            return
        sampled = self.compute(plan)
        for event in self.scheduler.commit(plan, sampled):
            self.told[event.request].append(event.token_id)
            if event.finish_reason is not None:
                assert event.request.finish_reason is event.finish_reason
                self.end(event.request, event.finish_reason.value)
            owed = event.request.num_tokens - event.request.num_computed_tokens
            assert owed == 1 or event.request.phase is Phase.FINISHED, "accepted tokens count as computed"
            if len(self.told[event.request]) == 1 and self.sample_of[event.request] == 0:
                for sample in range(1, self.jobs[event.request].samples):
                    self.scheduler.fork(event.request, self.make(self.jobs[event.request], sample))
                    self.tally["forks"] += 1

    def compute(self, plan: StepPlan) -> list[list[int] | None]:
        """The engine's step and a sampler that verifies drafts; a failed row ends its request before the commit."""
        sequences = [
            SequenceStep(one.token_ids(), one.request.num_computed_tokens, one.request.block_table, one.num_logits)
            for one in plan.work
        ]
        rows = iter(self.engine.step(sequences).argmax(axis=1).tolist())
        sampled: list[list[int] | None] = []
        for work in plan.work:
            if not work.samples:
                continue
            best = [choose(next(rows), self.sample_of[work.request]) for _ in range(work.num_logits)]
            accepted = 0
            while accepted < len(work.draft) and work.draft[accepted] == best[accepted]:
                accepted += 1
            if self.rng.random() < self.workload.failing_rows:
                self.fail(work.request, "failed row")
                sampled.append(None)
            else:
                sampled.append(best[: accepted + 1])
        return sampled

    def fail(self, request: Request, why: str) -> None:
        self.scheduler.finish(request, FinishReason.ERROR)
        self.end(request, why)

    def end(self, request: Request, why: str) -> None:
        assert request not in self.ends, f"request {request.key} was answered twice: {self.ends[request]}, then {why}"
        self.ends[request] = why
        self.tally[why] += 1

    def check_plan(self, plan: StepPlan) -> None:
        """The budget holds, somebody progresses, and the oldest running request always does."""
        requests = [work.request for work in plan.work]
        assert plan.num_tokens <= self.workload.config.max_num_batched_tokens, "the token budget is exceeded"
        assert len(set(requests)) == len(requests) and all(one.phase is Phase.RUNNING for one in requests)
        oldest = min(self.scheduler.running, key=lambda request: request.order, default=None)
        assert oldest in requests or not self.scheduler.has_work, "the oldest running request makes no progress"
        assert all(victim.order > oldest.order for victim in plan.preempted), "the oldest running request was preempted"
        salts: dict[int, str] = {}
        for work in plan.work:
            request = work.request
            assert work.num_new_tokens <= (request.max_chunk or 99) or request.output_ids
            assert request.reuse_prefix or request.num_cached_tokens == 0
            for block in request.block_table:
                assert salts.setdefault(block, request.cache_salt) == request.cache_salt, "a salt is no wall"
            self.tally["chunks"] += not work.samples

    def check_end(self) -> None:
        """Everybody was answered with the tokens that it gets alone, and nothing is left behind."""
        for request in self.jobs:
            tokens, expected, why = self.told[request], self.expected[request], self.ends[request]
            assert request.output_ids == tokens == expected[: len(tokens)], f"request {request.key} has other tokens"
            if why in ("stop", "length"):
                assert tokens == expected and why == ("stop" if tokens[-1] in request.stop_token_ids else "length")
        scheduler = self.scheduler
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks and scheduler.kv_cache_usage == 0.0
        assert scheduler.num_generated_tokens == sum(map(len, self.told.values()))
        for name in (
            "preemptions",
            "fairness_preemptions",
            "prefix_queries",
            "prefix_hits",
            "draft_tokens",
            "accepted_tokens",
        ):
            self.tally[name] = getattr(scheduler, f"num_{name}")
        self.tally["rejected_tokens"] = scheduler.num_draft_tokens - scheduler.num_accepted_tokens

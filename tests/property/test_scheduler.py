"""Batching, chunking, preemption, prefix reuse and cancellation never change a request's tokens."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tritonforge.engines.base import EngineSpec, SequenceStep
from tritonforge.engines.simulated import SimulatedEngine
from tritonforge.scheduling.blocks import BlockManager
from tritonforge.scheduling.request import FinishReason, Request
from tritonforge.scheduling.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE = 4
VOCAB = 11
STOP_TOKEN = 7
MAX_LEN = 40


@dataclass(frozen=True)
class Job:
    """One request of a random workload; `cancel_at` counts steps after its arrival (None: never)."""

    prompt: tuple[int, ...]
    max_tokens: int
    arrives_at: int
    cancel_at: int | None
    stops: bool


prompts = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24).map(tuple),
    st.integers(1, 24).map(lambda n: tuple(i % VOCAB for i in range(n))),  # these share prefixes
)
jobs = st.lists(
    st.builds(
        Job,
        prompt=prompts,
        max_tokens=st.integers(1, 16),
        arrives_at=st.integers(0, 12),
        cancel_at=st.one_of(st.none(), st.none(), st.integers(0, 12)),
        stops=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


def simulate(workload: list[Job], num_blocks: int, max_num_seqs: int, budget: int) -> list[Request]:
    """Run `workload` to the end on the simulated engine, checking invariants after each step."""
    engine = SimulatedEngine(EngineSpec(VOCAB, MAX_LEN, BLOCK_SIZE, num_blocks))
    config = SchedulerConfig(max_num_seqs, max(budget, max_num_seqs), max_waiting=64, max_waiting_tokens=4096)
    scheduler = Scheduler(config, BlockManager(num_blocks, BLOCK_SIZE))
    stops = frozenset({STOP_TOKEN})
    requests = [
        Request(i, job.prompt, job.max_tokens, stops if job.stops else frozenset()) for i, job in enumerate(workload)
    ]
    for step in range(5000):
        for job, request in zip(workload, requests, strict=True):
            if job.arrives_at == step:
                scheduler.add(request)
            if job.cancel_at is not None and job.arrives_at + job.cancel_at == step:
                scheduler.finish(request, FinishReason.CANCELLED)
        if not scheduler.has_work and step > 12:
            return requests
        run_step(scheduler, engine, config.max_num_batched_tokens)
    raise AssertionError("the workload did not end: the scheduler makes no progress")


def sequence_step(work) -> SequenceStep:
    request = work.request
    return SequenceStep(work.token_ids(), request.num_computed_tokens, request.block_table, work.num_logits)


def run_step(scheduler: Scheduler, engine: SimulatedEngine, budget: int) -> None:
    plan = scheduler.schedule()
    assert plan.num_tokens <= budget
    assert plan.work or not scheduler.has_work or plan.preempted, "work is waiting, and the step computes nothing"
    sequences = [sequence_step(work) for work in plan.work]
    tokens = engine.step(sequences).argmax(axis=1).tolist()
    scheduler.commit(plan, [[token_id] for token_id in tokens])
    scheduler.check_invariants()


@settings(max_examples=300, deadline=None)
@given(
    workload=jobs, num_blocks=st.integers(MAX_LEN // BLOCK_SIZE, 40), seats=st.integers(1, 8), budget=st.integers(1, 40)
)
def test_batching_never_changes_tokens(workload, num_blocks, seats, budget):
    batched = simulate(workload, num_blocks, seats, budget)
    for job, request in zip(workload, batched, strict=True):
        unhurried = Job(job.prompt, job.max_tokens, 0, None, job.stops)
        [alone] = simulate([unhurried], MAX_LEN // BLOCK_SIZE, 1, MAX_LEN)
        assert request.output_ids == alone.output_ids[: len(request.output_ids)], "a neighbour changed the tokens"
        if request.finish_reason is not FinishReason.CANCELLED:
            assert request.output_ids == alone.output_ids
            assert request.finish_reason is alone.finish_reason


@settings(max_examples=100, deadline=None)
@given(workload=jobs, num_blocks=st.integers(MAX_LEN // BLOCK_SIZE, 14), seats=st.integers(2, 8))
def test_every_block_comes_back(workload, num_blocks, seats):
    engine_blocks = BlockManager(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(seats, 16, 64, 4096), engine_blocks)
    engine = SimulatedEngine(EngineSpec(VOCAB, MAX_LEN, BLOCK_SIZE, num_blocks))
    for i, job in enumerate(workload):
        scheduler.add(Request(i, job.prompt, job.max_tokens))
    while scheduler.has_work:
        run_step(scheduler, engine, 16)
    assert engine_blocks.num_free == num_blocks


def test_a_small_pool_preempts_and_a_shared_prefix_is_reused():
    """The random workloads above are worth something only if they reach preemption and prefix reuse."""
    shared = tuple(range(8))
    workload = [Job((*shared, i), 16, 0 if i == 0 else 3, None, False) for i in range(6)]
    requests = simulate(workload, num_blocks=10, max_num_seqs=6, budget=16)
    assert sum(request.preemptions for request in requests) > 0
    assert all(request.num_cached_tokens == len(shared) for request in requests[1:])

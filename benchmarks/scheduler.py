"""Times the scheduler alone: schedule, commit and block bookkeeping of decode steps, without a model.

Usage: python -m benchmarks.scheduler. Prints the median and the 99th percentile of a step in ms, for several numbers of
running sequences, and the median in microseconds a sequence.
"""

import gc
import statistics
import time

from tritonforge.scheduling.blocks import BlockManager
from tritonforge.scheduling.request import Request
from tritonforge.scheduling.scheduler import Scheduler, SchedulerConfig

SEQUENCES = (16, 64, 256, 512)
PROMPT_TOKENS = 200
STEPS = 400
BLOCK_SIZE = 32
NUM_WAITING = 64
LIMIT_MS = {16: 0.3, 256: 1.5}


def running(num_seqs: int) -> Scheduler:
    """A scheduler with `num_seqs` decoding requests of four tenants, and others that wait for their seats."""
    blocks_each = -(-(PROMPT_TOKENS + STEPS) // BLOCK_SIZE) + 1
    config = SchedulerConfig(num_seqs, num_seqs * PROMPT_TOKENS, NUM_WAITING, 1 << 20)
    scheduler = Scheduler(config, BlockManager(num_seqs * blocks_each, BLOCK_SIZE))
    for key in range(num_seqs + NUM_WAITING):
        prompt = [key, *range(PROMPT_TOKENS - 1)]
        scheduler.add(Request(key, prompt, STEPS + 100, tenant=str(key % 4)))
    commit(scheduler)
    assert scheduler.num_running == num_seqs
    return scheduler


def commit(scheduler: Scheduler) -> None:
    """One step: every request that samples gets a token."""
    plan = scheduler.schedule()
    scheduler.commit(plan, [(work.num_new_tokens,) for work in plan.work if work.samples])


def measure(num_seqs: int) -> list[float]:
    """Milliseconds of each step."""
    scheduler = running(num_seqs)
    gc.collect()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter_ns()
        commit(scheduler)
        times.append((time.perf_counter_ns() - start) / 1e6)
    return times


def main() -> None:
    print(f"{'running':>8} {'median ms':>10} {'p99 ms':>8} {'us a sequence':>14} {'limit ms':>9}")
    for num_seqs in SEQUENCES:
        times = measure(num_seqs)
        median, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
        limit = f"{LIMIT_MS[num_seqs]:.1f}" if num_seqs in LIMIT_MS else ""
        print(f"{num_seqs:8} {median:10.3f} {p99:8.3f} {median / num_seqs * 1000:14.2f} {limit:>9}")


if __name__ == "__main__":
    main()

"""Runs random workloads on all cores. Usage: python -m tests.simulation.soak [COUNT] [--seed SEED] [--linear]

COUNT workloads (10,000) with the seeds 0, 1, ...; or the one of SEED; on a paged KV cache, or a linear one. Prints how
often each feature was met, as JSON.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from workload_run import Run
from workloads import Workload

CHUNK = 100


def run_seeds(seeds: range, linear: bool) -> Counter[str]:
    """Run the workloads of `seeds`; a failure names its seed."""
    tally: Counter[str] = Counter()
    for seed in seeds:
        try:
            tally += Run(Workload.random_linear(seed) if linear else Workload.random(seed)).run()
        except Exception as error:
            again = f"python -m tests.simulation.soak --seed {seed}{' --linear' if linear else ''}"
            raise AssertionError(f"workload {seed} failed: {error!r}; again: {again}") from error
    return tally


def soak(count: int, *, linear: bool) -> Counter[str]:
    """How often each feature was met in the workloads of the seeds 0 to count - 1."""
    chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return sum(pool.map(run_seeds, chunks, [linear] * len(chunks)), Counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, help="run this workload alone")
    parser.add_argument("--linear", action="store_true", help="a slot of the KV cache for each sequence")
    options = parser.parse_args()
    start = time.perf_counter()
    if options.seed is None:
        tally = soak(options.count, linear=options.linear)
    else:
        tally = run_seeds(range(options.seed, options.seed + 1), options.linear)
    print(json.dumps({**dict(sorted(tally.items())), "seconds": round(time.perf_counter() - start, 1)}, indent=1))


if __name__ == "__main__":
    main()

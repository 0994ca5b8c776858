"""Runs random workloads on all cores. Usage: python -m tests.simulation.soak [COUNT] [--seed SEED]

COUNT workloads (10,000) with the seeds 0, 1, ...; or the one of SEED. Prints how often each feature was met, as JSON.
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


def run_seeds(seeds: range) -> Counter[str]:
    """Run the workloads of `seeds`; a failure names its seed."""
    tally: Counter[str] = Counter()
    for seed in seeds:
        try:
            tally += Run(Workload.random(seed)).run()
        except Exception as error:
            raise AssertionError(
                f"workload {seed} failed: {error!r}; again: python -m tests.simulation.soak --seed {seed}"
            ) from error
    return tally


def soak(count: int) -> Counter[str]:
    """How often each feature was met in the workloads of the seeds 0 to count - 1."""
    chunks = (range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return sum(pool.map(run_seeds, chunks), Counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, help="run this workload alone")
    options = parser.parse_args()
    start = time.perf_counter()
    tally = soak(options.count) if options.seed is None else run_seeds(range(options.seed, options.seed + 1))
    print(json.dumps({**dict(sorted(tally.items())), "seconds": round(time.perf_counter() - start, 1)}, indent=1))


if __name__ == "__main__":
    main()

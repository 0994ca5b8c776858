"""Does a served release stay what it is? Mixed load for half an hour, then: is memory flat, is everything accounted?

python -m benchmarks.soak --release artifacts/releases/smollm2-135m-int8 --minutes 30

Prints a table; exit code 0 when memory grew by less than the limit after warm-up, every request ended as its kind may,
and the idle server holds no request and no KV block. The samples are written as JSON.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from benchmarks.observe import decoder_metrics, memory
from benchmarks.soak_load import CANCELLED, FAILED, FINISHED, OPTIONS, REFUSED, SHED, Load, Tally, known
from tritonforge.client import connect
from tritonforge.server import Server

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 12
SAMPLE_S = 2.0
FLOOD_S = 60.0
GROWTH_MAX = 0.02
IDLE_S = 60.0
SETTLE_S = 0.5
OUTCOMES = {"finished": (FINISHED,), "cancelled": (CANCELLED,), "refused": (REFUSED, SHED)}
"""How a request may end, for the account: each that was sent must be one of these."""

Sample = dict[str, int]


def run_load(server: Server, seconds: float, seed: int) -> tuple[Tally, list[Sample], list[str]]:
    """Load `server` for `seconds`; return what became of the requests, the memory samples, the options left out."""
    stop, samples = threading.Event(), []
    with connect(server.grpc_url) as channel, ThreadPoolExecutor(WORKERS + 1) as pool:
        options = known(channel)
        load = Load(channel, options, stop)
        clients = [pool.submit(load.work, seed * WORKERS + number) for number in range(WORKERS)]
        clients.append(pool.submit(load.floods, seed, min(FLOOD_S, seconds / 12)))
        try:
            samples = sample(server, seconds, load.tally)
        finally:
            stop.set()
        for client in clients:
            client.result()
    return load.tally, samples, [name for name in OPTIONS if name not in options]


def sample(server: Server, seconds: float, tally: Tally) -> list[Sample]:
    """The server's memory every SAMPLE_S seconds, at absolute times; says every minute how far it is."""
    start, samples = time.monotonic(), []
    for due in itertools.takewhile(lambda due: due < seconds, itertools.count(0.0, SAMPLE_S)):
        time.sleep(max(0.0, start + due - time.monotonic()))
        with contextlib.suppress(psutil.Error, OSError):  # a process died: the pids will tell
            samples.append(memory(server))
        if samples and due % 60 < SAMPLE_S:
            used = ", ".join(f"{name} {value / 2**20:.1f}" for name, value in samples[-1].items())
            print(f"  {due / 60:.0f} min: {tally.sent} requests sent; MiB: {used}", flush=True)
    return samples


def tenths(values: Sequence[int]) -> list[float]:
    """The mean of each tenth of `values` (at least ten), in MiB."""
    bounds = [len(values) * tenth // 10 for tenth in range(11)]
    return [statistics.mean(values[low:high]) / 2**20 for low, high in itertools.pairwise(bounds)]


def wait_until_idle(server: Server) -> tuple[dict[str, float], float]:
    """The decoder's metrics once it holds nothing any more, or after IDLE_S as they are; and the seconds it took."""
    start = time.monotonic()
    while held(decoder_metrics(server)) > 0 and time.monotonic() - start < IDLE_S:
        time.sleep(0.1)
    waited = time.monotonic() - start
    time.sleep(SETTLE_S)  # the metrics are written one after the other
    return decoder_metrics(server), waited


def held(found: dict[str, float]) -> float:
    """Requests and KV blocks that the decoder still holds."""
    requests = found["num_requests_running"] + found["num_requests_waiting"]
    return requests + found["kv_blocks"] - found["kv_blocks_free"]


def verdict(tally: Tally, samples: list[Sample], idle: dict[str, float], waited_s: float) -> bool:
    """Print the table; True when all checks hold."""
    checks = []

    def say(good: bool, text: str) -> None:
        checks.append(good)
        print(f"{'ok  ' if good else 'FAIL'}  {text}")

    print(f"      {'MiB, mean of each tenth':24}{'growth from the second to the last':>92}")
    for name in samples[0]:
        means = tenths([each.get(name, 0) for each in samples])
        grown = means[-1] / means[1] - 1  # the first tenth is warm-up
        say(grown < GROWTH_MAX, f"{name:16}{''.join(f'{mean:9.1f}' for mean in means)}{grown:10.2%}")
    kept = all(set(each) == set(samples[0]) for each in samples)
    say(kept, "the same processes throughout")
    for kind in dict(tally.counts):
        print(f"      {kind[0]} {kind[1]}: {tally.counts[kind]}")
    ended = {name: tally.total(*outcomes) for name, outcomes in OUTCOMES.items()}
    words = " + ".join(f"{count} {name}" for name, count in ended.items())
    say(tally.sent == sum(ended.values()), f"{tally.sent} sent = {words}; {tally.total(FAILED)} failed")
    say(not tally.surprises, f"{len(tally.surprises)} ended as their kind may not")
    for surprise in tally.surprises:
        print(f"      {surprise}")
    words = ", ".join(f"{name} {value:g}" for name, value in idle.items())
    say(held(idle) == 0, f"nothing is held {waited_s:.1f} s after the load: {words}")
    return all(checks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", type=Path, default=ROOT / "artifacts" / "releases" / "smollm2-135m-int8")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts" / "benchmarks" / "soak.json")
    options = parser.parse_args()
    if options.minutes < 20 * SAMPLE_S / 60:
        parser.error(f"--minutes must be at least {20 * SAMPLE_S / 60:.2g}: a tenth needs two samples")
    with Server(options.release) as server:
        print(f"{options.release.name}: {options.minutes:g} min, {WORKERS} clients, pid {server.pid}", flush=True)
        pid = server.pid
        tally, samples, left_out = run_load(server, options.minutes * 60, options.seed)
        if left_out:
            print(f"      not known to this release, left out: {', '.join(left_out)}")
        good = verdict(tally, samples, *wait_until_idle(server)) and server.pid == pid
        print("the server was restarted" if server.pid != pid else "the server was never restarted")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"sample_s": SAMPLE_S, "samples": samples}), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

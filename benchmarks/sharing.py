"""What requests that share an engine do to each other: a common prefix, a small KV pool, a flood from another tenant.

python -m benchmarks.sharing prefix|pool|tenants RELEASE

The engine loop in this process, without Triton. Each prints its figures, and the ratio that matters.
"""

import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence

from benchmarks.engine_loop import load
from tritonforge.generate_request import GenerateRequest
from tritonforge.loop import EngineLoop

WAIT_S = 600.0


class Call:
    """One request: its TTFT in s, its tokens and its statistics; `wait` for its end."""

    def __init__(self, loop: EngineLoop, prompt: Sequence[int], max_tokens: int, **options) -> None:
        self.token_ids: list[int] = []
        self.ttft_s: float | None = None
        self.statistics: dict[str, int] = {}
        self._ended = threading.Event()
        self._start = time.perf_counter()
        asked = GenerateRequest(tuple(prompt), max_tokens, ignore_eos=True, stream=True, **options)
        loop.submit(asked, self._take)

    def _take(self, generation, delta) -> None:
        if delta.error is None and self.ttft_s is None:
            self.ttft_s = time.perf_counter() - self._start
        self.token_ids += delta.token_ids
        if delta.final:
            self.statistics = generation.statistics(time.monotonic_ns())
            self._ended.set()

    def wait(self) -> "Call":
        """Block until the request has ended."""
        assert self._ended.wait(WAIT_S), "a request did not end"
        return self


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Token ids that no tokenizer would write in a row: nothing is cached, nothing is guessed."""
    return [rng.randrange(100, 40_000) for _ in range(count)]


def prefix(release: str) -> None:
    """TTFT of 15 followers of a prompt that share 600 tokens with it, with the prefix cache and, salted, without."""
    loop = load(release, {})
    loop.start()
    rng = random.Random(1)
    Call(loop, random_ids(rng, 632), 2).wait()
    ratios = []
    for repeat in range(5):
        shared = random_ids(rng, 600)
        prompts = [shared + random_ids(rng, 20) for _ in range(16)]
        times, tokens = {}, {}
        for name in ("without", "with"):
            salts = [f"{repeat}" if name == "with" else f"{repeat}-{index}" for index in range(16)]
            calls = [Call(loop, prompt, 8, cache_salt=salt).wait() for prompt, salt in zip(prompts, salts, strict=True)]
            times[name] = statistics.median(call.ttft_s for call in calls[1:])
            tokens[name] = [call.token_ids for call in calls]
        same = sum(a == b for a, b in zip(tokens["with"], tokens["without"], strict=True))
        ratios.append(times["without"] / times["with"])
        print(
            f"followers' TTFT: {times['with'] * 1e3:.1f} ms with the cache, {times['without'] * 1e3:.1f} ms without, "
            f"{ratios[-1]:.2f} times; {same} of 16 answers the same"
        )
    print(f"median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    loop.drain(0)


def pool(release: str) -> None:
    """Throughput of 24 requests of 100 + 150 tokens when the pool holds a half of them at full length, and all."""
    rng = random.Random(2)
    prompts = [random_ids(rng, 100) for _ in range(24)]
    rates = {}
    for name, blocks in (("ample", 24 * 8 + 8), ("half", 12 * 8)):
        loop = load(release, {"num_blocks": str(blocks)})
        loop.start()
        Call(loop, random_ids(rng, 100), 8).wait()
        start = time.perf_counter()
        calls = [Call(loop, prompt, 150) for prompt in prompts]
        ended = [call.wait() for call in calls]
        rates[name] = sum(len(call.token_ids) for call in ended) / (time.perf_counter() - start)
        preemptions = loop.scheduler.num_preemptions
        complete = sum(len(call.token_ids) == 150 for call in ended)
        print(f"{name}: {blocks} blocks, {rates[name]:.0f} tok/s, {complete} of 24 complete, {preemptions} preemptions")
        loop.drain(0)
    print(f"small pool / ample pool, tok/s: {rates['half'] / rates['ample']:.2f}")


def tenants(release: str) -> None:
    """TTFT p95 of a tenant that asks now and then, alone and while another keeps 50 requests open, in turns."""
    loop = load(release, {})
    loop.start()
    rng = random.Random(3)
    Call(loop, random_ids(rng, 500), 8).wait()
    for prompt_tokens in (128, 400):
        times: dict[str, list[float]] = {"alone": [], "flooded": []}
        flood_tokens, flood_s = 0, 0.0
        for _ in range(3):
            times["alone"] += _now_and_then(loop, rng, prompt_tokens)
            with Flood(loop) as flood:
                times["flooded"] += _now_and_then(loop, rng, prompt_tokens)
            flood_tokens += flood.tokens
            flood_s += flood.seconds
        p95 = {name: statistics.quantiles(values, n=20)[18] for name, values in times.items()}
        print(
            f"prompts of {prompt_tokens} tokens: TTFT p95 alone {p95['alone'] * 1e3:.0f} ms, in the flood "
            f"{p95['flooded'] * 1e3:.0f} ms: {p95['flooded'] / p95['alone']:.2f} times; "
            f"the flood got {flood_tokens / flood_s:.0f} tok/s"
        )
    print(f"{loop.scheduler.num_fairness_preemptions} preemptions made way")
    loop.drain(0)


def _now_and_then(loop: EngineLoop, rng: random.Random, prompt_tokens: int) -> list[float]:
    """The TTFTs in s of 15 requests of one tenant, at random times."""
    found = []
    for _ in range(15):
        time.sleep(rng.uniform(0.2, 0.8))
        found.append(Call(loop, random_ids(rng, prompt_tokens), 16, tenant="quiet").wait().ttft_s)
    return found


class Flood:
    """50 threads that each send one request after another, 128 tokens in and 64 out, while the context is open."""

    def __init__(self, loop: EngineLoop) -> None:
        self.tokens, self.seconds = 0, 0.0
        self._loop = loop
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(50)]

    def __enter__(self) -> "Flood":
        self._start = time.perf_counter()
        self.tokens = self._loop.scheduler.num_generated_tokens
        for thread in self._threads:
            thread.start()
        time.sleep(3.0)  # until all seats are taken
        return self

    def __exit__(self, *_) -> None:
        self.tokens = self._loop.scheduler.num_generated_tokens - self.tokens
        self.seconds = time.perf_counter() - self._start
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        rng = random.Random()
        while not self._stop.is_set():
            Call(self._loop, random_ids(rng, 128), 64, tenant="flood").wait()


if __name__ == "__main__":
    {"prefix": prefix, "pool": pool, "tenants": tenants}[sys.argv[1]](sys.argv[2])

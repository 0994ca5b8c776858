"""Contestant: the release served by tritonserver, called through `llm` over gRPC streams.

Usage: served.py RELEASE WORKLOAD [--speculate]. The client is a part of what is measured: it runs in this process, on
the same cores as the server. Nothing is guessed by prompt lookup without --speculate.
"""

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from benchmarks.workload import Figures, Prompt, Workload
from tritonforge.client import connect, infer_request, stream
from tritonforge.server import Server

TIMEOUT_S = 300.0


def ask(channel: grpc.Channel, prompt: Prompt, max_tokens: int, speculate: bool) -> tuple[float, float, dict[str, int]]:
    """TTFT in s, time from first to last token in s, and the statistics of the last response."""
    options = {"max_tokens": max_tokens, "ignore_eos": True, "stream": True, "speculate": speculate}
    request = infer_request("llm", text=prompt.text, **options)
    start = time.perf_counter()
    chunks = [(time.perf_counter(), chunk) for chunk in stream(channel, request, TIMEOUT_S)]
    (first, _), (last, final) = chunks[0], chunks[-1]
    assert final.statistics["completion_tokens"] == max_tokens, final
    return first - start, last - first, final.statistics


def main() -> None:
    release, workload_file, *flags = sys.argv[1:]
    speculate = flags == ["--speculate"]
    workload = Workload.read(Path(workload_file))
    tokens, count = workload.max_tokens, len(workload.batch)
    with Server(release) as server, connect(server.grpc_url) as channel, ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda prompt: ask(channel, prompt, tokens // 4, speculate), workload.warmup))
        start = time.perf_counter()
        list(pool.map(lambda prompt: ask(channel, prompt, tokens, speculate), workload.batch))
        seconds = time.perf_counter() - start
        single = [ask(channel, prompt, tokens, speculate) for prompt in workload.single]
    Figures(
        tokens_per_s=count * tokens / seconds,
        tpot_ms=statistics.median(decode / (tokens - 1) for _, decode, _ in single) * 1e3,
        ttft_ms=statistics.median(ttft for ttft, _, _ in single) * 1e3,
        outside_engine_ms=statistics.median(ttft * 1e3 - stats["prefill_us"] / 1e3 for ttft, _, stats in single),
    ).print()


if __name__ == "__main__":
    main()

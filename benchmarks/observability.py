"""What metrics, request log and traces cost: two servers on one release, one that is observed and one that is not.

    python -m benchmarks.observability RELEASE [--rounds 3] [--pairs 20] [--tokens 48]

Both run all the time, and take a batch of 16 streams in turns; the order of a pair changes from pair to pair. Observed
means metrics, one line a request, and spans of every hundredth request to a collector in this process. Ratios are taken
within a pair, because the machine drifts; each round starts both servers anew, because two processes of the same code
differ in speed too. The interval is that of the median, from the ratios in order (binomial, 95%).
"""

import argparse
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from loadtests.binomial import quantile_ranks
from tritonforge.client import connect, infer_request, stream
from tritonforge.observation.observation import Observation
from tritonforge.server import Server

STREAMS = 16
PROMPT = list(range(1000, 1128))


class Collector(BaseHTTPRequestHandler):
    """Takes whatever spans come."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[str]:
    """Its URL, while it runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def tokens_per_second(server: Server, tokens: int, seed: int) -> float:
    """Of a batch of streams, each with a prompt of its own."""

    def one(number: int) -> int:
        prompt = [(token + 131 * number + 17 * seed) % 40_000 for token in PROMPT]
        options = {"max_tokens": tokens, "ignore_eos": True, "stream": True, "speculate": False}
        chunks = stream(channel, infer_request("decoder", input_ids=prompt, **options), 300)
        return sum(len(chunk.token_ids) for chunk in chunks)

    with connect(server.grpc_url) as channel, ThreadPoolExecutor(STREAMS) as pool:
        started = time.monotonic()
        return sum(pool.map(one, range(STREAMS))) / (time.monotonic() - started)


def round_of_pairs(release: Path, pairs: int, tokens: int) -> list[float]:
    """The ratio observed / plain of each pair, on two servers of its own."""
    ratios: list[float] = []
    with (
        collector() as url,
        Server(release, observe=Observation(otlp_endpoint=url, trace_ratio=0.01)) as observed,
        Server(release, observe=Observation(metrics=False)) as plain,
    ):
        for server in (observed, plain):
            tokens_per_second(server, 16, 0)
        for pair in range(1, pairs + 1):
            order = (observed, plain) if pair % 2 else (plain, observed)
            rates = {id(server): tokens_per_second(server, tokens, pair) for server in order}
            ratios.append(rates[id(observed)] / rates[id(plain)])
            print(f"pair {pair}: observed {rates[id(observed)]:.0f}, plain {rates[id(plain)]:.0f} tok/s", flush=True)
    return ratios


def median_interval(values: list[float]) -> tuple[float, float]:
    """Between which two of the values the median lies with 95% confidence; the outermost when they are too few."""
    ordered = sorted(values)
    low, high = quantile_ranks(len(values), 0.5, 0.975)
    return ordered[low or 0], ordered[-1 if high is None else high]


def main() -> None:
    """Print each round's median, and the median of all pairs with its interval and their range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    ratios: list[float] = []
    for number in range(1, options.rounds + 1):
        found = round_of_pairs(options.release, options.pairs, options.tokens)
        print(f"round {number}: observed / plain, median {statistics.median(found):.3f}", flush=True)
        ratios += found
    low, high = median_interval(ratios)
    print(
        f"observed / plain: median {statistics.median(ratios):.3f}, 95% interval {low:.3f} to {high:.3f}, "
        f"{len(ratios)} pairs from {min(ratios):.3f} to {max(ratios):.3f}"
    )


if __name__ == "__main__":
    main()

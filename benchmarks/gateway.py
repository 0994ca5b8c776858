"""What the gateway costs: the same streams asked of it over HTTP and of Triton directly over gRPC, in turns.

Usage: python -m benchmarks.gateway RELEASE [--rounds N] [--streams N] [--tokens N]. One tritonserver and one gateway
process run for the whole measurement, no prompt is used twice. Throughput: batches of N streams, in turns; the ratio
is taken within a round, because the machine drifts. TTFT, from sending a request to its first text: N streams side by
side, each asking the one and the other in turns, so that both see the same load.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2_grpc

from benchmarks.openai_stream import OpenAIStreams, Timed
from benchmarks.workload import Prompt, build_workload
from tritonforge.client import NO_PROXY, infer_request, is_final, parse_response
from tritonforge.gateway.limits.keys import create_key
from tritonforge.release import Release
from tritonforge.server import Server

STAGGER_S = 0.25
"""Between the starts of two streams, so that they do not all prefill at once."""


class Direct:
    """Triton's ensemble over gRPC."""

    def __init__(self, url: str) -> None:
        self._channel = grpc.aio.insecure_channel(url, options=NO_PROXY)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def ask(self, prompt: str, tokens: int) -> Timed:
        """Stream one answer of exactly `tokens` tokens."""
        options = {"max_tokens": tokens, "ignore_eos": True, "stream": True}
        start, first = time.perf_counter(), None
        request = infer_request("llm", text=prompt, **options)
        async for response in self._stub.ModelStreamInfer(iter((request,))):
            chunk = parse_response(response)
            last = time.perf_counter() - start
            first = first or last
            if is_final(response):
                assert chunk.statistics["completion_tokens"] == tokens
        return Timed(first, last - first)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


@contextmanager
def gateway_process(server: Server, keys: Path) -> Iterator[int]:
    """A gateway in front of `server`, in a process of its own: its port."""
    command = [sys.executable, "-m", "tritonforge", "gateway", "--triton", server.grpc_url, "--keys", str(keys)]
    command += ["--release", str(server.release.root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield next(int(line.split(":")[-1].split("/")[0]) for line in process.stdout if "API" in line)
        finally:
            process.terminate()


async def run_batch(client: Direct | OpenAIStreams, prompts: list[Prompt], tokens: int) -> float:
    """Output tokens per second of all prompts at once."""
    start = time.perf_counter()
    await asyncio.gather(*(client.ask(prompt.text, tokens) for prompt in prompts))
    return len(prompts) * tokens / (time.perf_counter() - start)


async def compare_first_tokens(
    direct: Direct, gateway: OpenAIStreams, prompts: list[list[Prompt]], tokens: int
) -> None:
    """TTFT of both ways under one load: each stream asks the one and the other in turns, all run side by side."""
    found: dict[str, list[float]] = {"direct": [], "gateway": []}

    async def stream(index: int, own: list[Prompt]) -> None:
        await asyncio.sleep(index * STAGGER_S)
        for turn, prompt in enumerate(own):
            name = "direct" if (index + turn) % 2 else "gateway"
            timed = await (direct if name == "direct" else gateway).ask(prompt.text, tokens)
            if turn:  # the first ones come together
                found[name].append(timed.ttft_s * 1e3)

    await asyncio.gather(*(stream(index, own) for index, own in enumerate(prompts)))
    told = {name: statistics.median(values) for name, values in found.items()}
    counts = " and ".join(f"{told[name]:.1f} ms {name} (n {len(values)})" for name, values in found.items())
    print(f"median TTFT, {len(prompts)} streams: {counts}; {told['gateway'] - told['direct']:+.1f} ms", flush=True)


async def compare_throughput(direct: Direct, gateway: OpenAIStreams, rounds: list[list[Prompt]], tokens: int) -> None:
    """Tokens per second of a batch that is sent at once, in turns. The first round is for warming up."""
    ratios = []
    for index, prompts in enumerate(rounds):
        half = len(prompts) // 2
        order = [("direct", direct, prompts[:half]), ("gateway", gateway, prompts[half:])]
        speed = {name: await run_batch(client, part, tokens) for name, client, part in order[:: 1 if index % 2 else -1]}
        if index:
            ratios.append(speed["gateway"] / speed["direct"])
            print(f"round {index}: direct {speed['direct']:.0f} tok/s, gateway {speed['gateway']:.0f}", flush=True)
    print(f"throughput, ratio: median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


async def measure(url: str, gateway: OpenAIStreams, rounds: list[list[Prompt]], streams: int, tokens: int) -> None:
    """Both comparisons."""
    direct = Direct(url)
    await compare_throughput(direct, gateway, [prompts[: 2 * streams] for prompts in rounds], tokens)
    spare = [prompt for prompts in rounds for prompt in prompts[2 * streams :]]
    await compare_first_tokens(direct, gateway, [spare[index::streams] for index in range(streams)], tokens)
    await direct.close()
    await gateway.close()


def main() -> None:
    """Start both servers and measure."""
    parser = argparse.ArgumentParser(description=__doc__.split(".")[0])
    parser.add_argument("release", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    release = Release.open(arguments.release)
    tokenizer = release.model_repository / "tokenizer" / "1" / "tokenizer.json"
    count = 3 * arguments.streams
    sizes = {"concurrency": count, "prompt_tokens": 128, "max_tokens": arguments.tokens}
    rounds = [build_workload(tokenizer, seed=seed, **sizes).batch for seed in range(arguments.rounds + 1)]
    with tempfile.TemporaryDirectory() as folder, Server(release.root) as server:
        keys = Path(folder) / "keys.json"
        _, key = create_key(keys, "bench")
        with gateway_process(server, keys) as port:
            client = OpenAIStreams(port, release.name, key=key)
            asyncio.run(measure(server.grpc_url, client, rounds, arguments.streams, arguments.tokens))


if __name__ == "__main__":
    main()

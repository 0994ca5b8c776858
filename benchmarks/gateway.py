"""What the gateway costs: the same streams asked of it over HTTP and of Triton directly over gRPC, in turns.

Usage: python -m benchmarks.gateway RELEASE [--rounds N] [--streams N] [--tokens N]. One tritonserver and one gateway
process run for the whole measurement. Each round sends a batch of prompts that nobody has seen, all at once, to `llm`
directly and to the gateway, first one and then the other in every second round. TTFT is from sending a request to its
first text; ratios and differences are taken within a round, because the machine drifts.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2_grpc

from benchmarks.workload import Prompt, build_workload
from tritonforge.client import NO_PROXY, infer_request, is_final, parse_response
from tritonforge.gateway.keys import create_key
from tritonforge.release import Release
from tritonforge.server import Server

START_S = 60.0


@dataclass(frozen=True)
class Batch:
    """TTFT of each stream in ms, and output tokens per second of the batch."""

    ttft_ms: list[float]
    tokens_per_s: float

    @property
    def median_ms(self) -> float:
        """The median TTFT."""
        return statistics.median(self.ttft_ms)


class Direct:
    """Triton's ensemble over gRPC."""

    def __init__(self, url: str) -> None:
        self._channel = grpc.aio.insecure_channel(url, options=NO_PROXY)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def ask(self, prompt: Prompt, tokens: int) -> float:
        """Seconds to the first text."""
        options = {"max_tokens": tokens, "ignore_eos": True, "stream": True}
        start, first = time.perf_counter(), None
        request = infer_request("llm", text=prompt.text, **options)
        async for response in self._stub.ModelStreamInfer(iter((request,))):
            chunk = parse_response(response)
            first = first or time.perf_counter() - start
            if is_final(response):
                assert chunk.statistics["completion_tokens"] == tokens
        return first

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class Gateway:
    """The gateway over HTTP: one connection a stream, kept for the next."""

    def __init__(self, port: int, key: str, model: str) -> None:
        self._port, self._key, self._model = port, key, model
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, prompt: Prompt, tokens: int) -> float:
        """Seconds to the first text."""
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        fields = {"max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        usage = {"stream_options": {"include_usage": True}}
        body = json.dumps({"model": self._model, "prompt": prompt.text} | fields | usage).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._key}\r\n"
        start, first, last = time.perf_counter(), None, b""
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        assert b" 200 " in status, status + await reader.read(2000)
        async for line in reader:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - start
                last = line
            elif line == b"0\r\n":
                await reader.readline()
                break
        assert json.loads(last[6:])["usage"]["completion_tokens"] == tokens, last
        self._idle.append((reader, writer))
        return first

    async def close(self) -> None:
        """Close the connections."""
        for _, writer in self._idle:
            writer.close()


async def run_batch(client: Direct | Gateway, prompts: list[Prompt], tokens: int) -> Batch:
    """All prompts at once."""
    start = time.perf_counter()
    firsts = await asyncio.gather(*(client.ask(prompt, tokens) for prompt in prompts))
    seconds = time.perf_counter() - start
    return Batch([first * 1e3 for first in firsts], len(prompts) * tokens / seconds)


async def measure(direct: Direct, gateway: Gateway, rounds: list[list[Prompt]], tokens: int) -> None:
    """Run all rounds and print what they say. The first round is for warming up."""
    differences, ratios, singles = [], [], []
    for index, prompts in enumerate(rounds):
        half = len(prompts) // 2
        batches: dict[str, Batch] = {}
        order = [("direct", direct, prompts[:half]), ("gateway", gateway, prompts[half:])]
        for name, client, part in order if index % 2 else order[::-1]:
            batches[name] = await run_batch(client, part[:-1], tokens)
            batches[f"{name} alone"] = await run_batch(client, part[-1:], 8)
        if index == 0:
            continue
        differences.append(batches["gateway"].median_ms - batches["direct"].median_ms)
        singles.append(batches["gateway alone"].median_ms - batches["direct alone"].median_ms)
        ratios.append(batches["gateway"].tokens_per_s / batches["direct"].tokens_per_s)
        print(
            f"round {index}: direct {batches['direct'].median_ms:.1f} ms, {batches['direct'].tokens_per_s:.0f} tok/s; "
            f"gateway {batches['gateway'].median_ms:.1f} ms, {batches['gateway'].tokens_per_s:.0f} tok/s; "
            f"alone {batches['direct alone'].median_ms:.1f} and {batches['gateway alone'].median_ms:.1f} ms",
            flush=True,
        )
    told = {"TTFT, ms more": differences, "TTFT of one stream, ms more": singles, "throughput, ratio": ratios}
    for name, values in told.items():
        print(f"{name}: median {statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})")
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
    count = 2 * (arguments.streams + 1)
    sizes = {"concurrency": count, "prompt_tokens": 128, "max_tokens": arguments.tokens}
    rounds = [build_workload(tokenizer, seed=seed, **sizes).batch for seed in range(arguments.rounds + 1)]
    with tempfile.TemporaryDirectory() as folder, Server(release.root) as server:
        keys = Path(folder) / "keys.json"
        _, key = create_key(keys, "bench")
        command = [sys.executable, "-m", "tritonforge", "gateway", "--triton", server.grpc_url, "--keys", str(keys)]
        command += ["--release", str(release.root), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                port = next(int(line.split(":")[-1].split("/")[0]) for line in process.stdout if "API" in line)
                asyncio.run(_measure(server.grpc_url, port, key, release.name, rounds, arguments.tokens))
            finally:
                process.terminate()


async def _measure(url: str, port: int, key: str, model: str, rounds: list[list[Prompt]], tokens: int) -> None:
    await measure(Direct(url), Gateway(port, key, model), rounds, tokens)


if __name__ == "__main__":
    main()

"""The served model beside other servers of the same checkpoint, all asked over OpenAI's API by one client, in turns.

    python -m benchmarks.peers RELEASE --peer 'vllm=vllm serve DIR --port {port}' [--peer ...] [--repeats 3]

Ours is tritonserver behind `tritonforge gateway`, with and without prompt lookup; another release of ours can be a peer
too, whose name may end in ", no prompt lookup". Each run of a contestant is a process of its own, on the same cores as
the client; contestants take turns within a repeat, and ratios are taken there, because the machine drifts. Every
prompt is new to its server and sent as token ids, so that all compute the same; every answer has exactly as many tokens
as were asked for.
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.openai_stream import OpenAIStreams
from benchmarks.workload import Figures, Workload, build_workload
from tritonforge.gateway.limits.keys import create_key
from tritonforge.launch.ports import LOOPBACK, Ports
from tritonforge.release import Release

ROOT = Path(__file__).resolve().parent.parent
NO_LOOKUP = ", no prompt lookup"
OURS, PLAIN = "tritonforge", f"tritonforge{NO_LOOKUP}"
START_S = 300.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def serving(command: list[str], port: int, key: str, log: Path) -> Iterator[str]:
    """Run a server until its API names a model; yields that name. Its whole process group ends with it."""
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=sink, start_new_session=True)
    try:
        yield _model_name(process, port, key, log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _model_name(process: subprocess.Popen, port: int, key: str, log: Path) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": f"Bearer {key}"})
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with _DIRECT.open(request, timeout=5) as answer:
                return json.load(answer)["data"][0]["id"]
        except (urllib.error.URLError, OSError, KeyError, IndexError):
            time.sleep(0.5)
    sys.exit(f"no server came up: {shlex.join(process.args)}\n{log.read_text(errors='replace')[-2000:]}")


async def measure(client: OpenAIStreams, workload: Workload) -> Figures:
    """Warm up, then the batch at once, then single streams."""
    tokens = workload.max_tokens
    await asyncio.gather(*(client.ask(prompt.token_ids, tokens // 4) for prompt in workload.warmup))
    start = time.perf_counter()
    await asyncio.gather(*(client.ask(prompt.token_ids, tokens) for prompt in workload.batch))
    seconds = time.perf_counter() - start
    single = [await client.ask(prompt.token_ids, tokens) for prompt in workload.single]
    await client.close()
    return Figures(
        tokens_per_s=len(workload.batch) * tokens / seconds,
        tpot_ms=statistics.median(timed.decode_s for timed in single) / (tokens - 1) * 1e3,
        ttft_ms=statistics.median(timed.ttft_s for timed in single) * 1e3,
    )


def run_once(name: str, commands: dict[str, str], workload: Workload, keys: Path, key: str) -> Figures:
    """One contestant, started for this run alone."""
    port = Ports(0, 0, 0).claim(LOOPBACK).http
    command = shlex.split(commands[name].replace("{port}", str(port)).replace("{keys}", str(keys)))
    fields = {"speculate": False} if name.endswith(NO_LOOKUP) else {}
    with serving(command, port, key, keys.parent / "server.log") as model:
        return asyncio.run(measure(OpenAIStreams(port, model, key=key, fields=fields), workload))


def table(runs: list[dict[str, Figures]]) -> str:
    """Medians of all contestants as Markdown, and ours over each peer's within a repeat."""
    fields = ("tokens_per_s", "tpot_ms", "ttft_ms")
    lines = ["| server | batch tok/s | TPOT ms, one stream | TTFT ms, one stream |", "|---|---|---|---|"]
    for name in runs[0]:
        lines.append(_row(name, [[getattr(run[name], field) for run in runs] for field in fields], 1))
    lines += ["", "| ratio to ... | batch tok/s | TPOT | TTFT |", "|---|---|---|---|"]
    for ours in (OURS, PLAIN):
        for peer in (name for name in runs[0] if name not in (OURS, PLAIN)):
            ratios = [[getattr(run[ours], field) / getattr(run[peer], field) for run in runs] for field in fields]
            lines.append(_row(f"{ours} / {peer}", ratios, 2))
    return "\n".join(lines)


def _row(name: str, columns: list[list[float]], digits: int) -> str:
    """Median, least and greatest of each column."""
    cells = [
        f"{statistics.median(column):.{digits}f} ({min(column):.{digits}f} to {max(column):.{digits}f})"
        for column in columns
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Measure all contestants in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="{port} is replaced")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # who ends it ends the server that it started
    release = Release.open(options.release)
    tokenizer = release.model_repository / "tokenizer" / "1" / "tokenizer.json"
    ours = f"{sys.executable} -m tritonforge gateway --release {release.root} --port {{port}} --keys {{keys}}"
    commands = {OURS: ours, PLAIN: ours} | dict(peer.split("=", 1) for peer in options.peer)
    sizes = {"concurrency": options.concurrency, "prompt_tokens": options.prompt_tokens}
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        _, key = create_key(keys, "bench")
        for repeat in range(options.repeats):
            workload = build_workload(tokenizer, seed=repeat, max_tokens=options.max_tokens, **sizes)
            order = list(commands) if repeat % 2 == 0 else list(reversed(commands))
            found = {name: run_once(name, commands, workload, keys, key) for name in order}
            runs.append({name: found[name] for name in commands})
            print(f"repeat {repeat + 1}:", {name: vars(figures) for name, figures in runs[-1].items()}, flush=True)
    print(table(runs))


if __name__ == "__main__":
    main()

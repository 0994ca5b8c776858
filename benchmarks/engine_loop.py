"""Contestant: the engine loop in this process, without Triton. Usage: engine_loop.py RELEASE WORKLOAD [KEY=VALUE ...]

KEY=VALUE sets a limit of the scheduler, num_blocks or else an OpenVINO property to other than the release's value: that
is how a recipe's defaults were chosen. Nothing is guessed by prompt lookup, as the peer does not either.
"""

import statistics
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.workload import Figures, Prompt, Workload
from tritonforge.decoder import DecoderConfig, load_loop
from tritonforge.generate_request import GenerateRequest
from tritonforge.loop import EngineLoop
from tritonforge.release import Release
from tritonforge.scheduling.scheduler_config import SchedulerConfig
from tritonforge.text import Tokenizer


def load(release: str, changes: dict[str, str]) -> EngineLoop:
    """The loop that the decoder of `release` would run, with `changes`."""
    folder = Release.open(release).model_repository / "decoder" / "1"
    config = DecoderConfig.read(folder / "decoder.json")
    limits = {name: int(value) for name, value in changes.items() if name in SchedulerConfig.__dataclass_fields__}
    sizes = {name: int(value) for name, value in changes.items() if name == "num_blocks"}
    properties = {name: value for name, value in changes.items() if name not in limits | sizes}
    engine_config = config.engine_config | sizes
    engine_config["properties"] = engine_config["properties"] | properties
    changed = replace(config, engine_config=engine_config, scheduler=replace(config.scheduler, **limits))
    return load_loop(changed, folder, Tokenizer(folder).decode)


def run(loop: EngineLoop, prompts: list[Prompt], max_tokens: int) -> tuple[float, list]:
    """Submit all prompts at once; return the seconds until the last answer ended, and the timelines."""
    ended = threading.Semaphore(0)
    timelines = []

    def sink(generation, delta):
        if delta.final:
            timelines.append(generation.timeline)
            ended.release()

    start = time.perf_counter()
    for prompt in prompts:
        asked = GenerateRequest(tuple(prompt.token_ids), max_tokens, ignore_eos=True, stream=True, speculate=False)
        loop.submit(asked, sink)
    for _ in prompts:
        ended.acquire()
    return time.perf_counter() - start, timelines


def main() -> None:
    release, workload_file, *changes = sys.argv[1:]
    workload = Workload.read(Path(workload_file))
    loop = load(release, dict(change.split("=", 1) for change in changes))
    loop.start()
    run(loop, workload.warmup, workload.max_tokens // 4)
    seconds, _ = run(loop, workload.batch, workload.max_tokens)
    single = [run(loop, [prompt], workload.max_tokens)[1][0] for prompt in workload.single]
    loop.drain(0)
    Figures(
        tokens_per_s=len(workload.batch) * workload.max_tokens / seconds,
        tpot_ms=statistics.median((t.last_token_ns - t.first_token_ns) / t.decode_steps for t in single) / 1e6,
        ttft_ms=statistics.median(t.first_token_ns - t.arrived_ns for t in single) / 1e6,
    ).print()


if __name__ == "__main__":
    main()

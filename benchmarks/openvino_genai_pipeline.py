"""Contestant: openvino-genai's ContinuousBatchingPipeline in this process, on the release's own engine files.

Usage: openvino_genai_pipeline.py RELEASE WORKLOAD [KEY=VALUE ...]. Same weights, same KV precision and block count as
the release; other OpenVINO properties are the pipeline's own defaults unless given. Runs in an environment of its own
(requirements/bench.txt) and reads JSON only, so that nothing of ours is imported.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai


def load(folder: Path, changes: dict[str, str]) -> genai.ContinuousBatchingPipeline:
    config = json.loads((folder / "decoder.json").read_text(encoding="utf-8"))
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = config["engine_config"]["num_blocks"]
    scheduler.max_num_seqs = config["scheduler"]["max_num_seqs"]
    scheduler.max_num_batched_tokens = config["scheduler"]["max_num_batched_tokens"]
    scheduler.enable_prefix_caching = False
    properties = {"KV_CACHE_PRECISION": config["engine_config"]["kv_cache_precision"], **changes}
    return genai.ContinuousBatchingPipeline(str(folder / "engine"), scheduler, "CPU", properties)


def run(pipeline, prompts: list[dict], max_tokens: int) -> tuple[float, list]:
    options = genai.GenerationConfig()
    options.set_eos_token_id(0)  # it must have one, though ends are ignored
    options.max_new_tokens, options.ignore_eos, options.do_sample = max_tokens, True, False
    ids = [ov.Tensor(np.array([prompt["token_ids"]], np.int64)) for prompt in prompts]
    start = time.perf_counter()
    results = pipeline.generate(ids, [options] * len(ids))
    seconds = time.perf_counter() - start
    assert all(len(result.m_generation_ids[0]) == max_tokens for result in results)
    return seconds, results


def main() -> None:
    release, workload_file, *changes = sys.argv[1:]
    workload = json.loads(Path(workload_file).read_text(encoding="utf-8"))
    tokens = workload["max_tokens"]
    folder = Path(release) / "model_repository" / "decoder" / "1"
    pipeline = load(folder, dict(change.split("=", 1) for change in changes))
    run(pipeline, workload["warmup"], tokens // 4)
    seconds, _ = run(pipeline, workload["batch"], tokens)
    single = [run(pipeline, [prompt], tokens)[1][0].perf_metrics for prompt in workload["single"]]
    figures = {
        "tokens_per_s": len(workload["batch"]) * tokens / seconds,
        "tpot_ms": statistics.median(one.get_tpot().mean for one in single),
        "ttft_ms": statistics.median(one.get_ttft().mean for one in single),
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()

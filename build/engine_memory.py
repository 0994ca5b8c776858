"""Measures what a compiled engine takes in memory, in a fresh process of its own. The compile stage calls it.

A process cannot measure this of itself after other work: memory once taken is not all given back.
"""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)

from tritonforge.available_memory import resident_bytes
from tritonforge.engines.base import Engine, SequenceStep
from tritonforge.errors import EngineFailure

MOST_SIZES = 32
"""Step sizes tried of each kind; where there are more, evenly spaced ones stand for all."""


def measure(target: str, folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """Bytes that the engine in `folder` takes with decoder.json's `config`.

    A paged cache is made for one sequence only; a linear one, where each has a slot of its own, as large as it is.

    num_blocks: its KV blocks. load_peak_bytes: the most while it opens. loaded_bytes: once it is open. step_bytes: what
    steps add, up to the largest ones with the longest context.
    """
    command = [sys.executable, str(Path(__file__).absolute()), target, str(Path(folder).absolute()), json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EngineFailure(f"the memory of the compiled engine could not be measured: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def probe(target: str, folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """What `measure` returns, taken in this process."""
    module = import_module(f"target_{target}")
    module.import_engine()
    engine_config = {name: value for name, value in config["engine_config"].items() if name != "fit_memory"}
    if engine_config["block_size"] < engine_config["max_model_len"]:
        engine_config["num_blocks"] = -(-engine_config["max_model_len"] // engine_config["block_size"])
    limits = config["scheduler"]
    before, _ = resident_bytes()
    engine = module.open_engine(folder, engine_config)
    loaded, load_peak = resident_bytes()
    fill(engine, limits["max_num_batched_tokens"])
    most = max(loaded, resident_bytes()[0])
    for step in steps(engine, limits["max_num_seqs"], limits["max_num_batched_tokens"]):
        engine.step(step)
        most = max(most, resident_bytes()[0])
    return {
        "num_blocks": engine.spec.num_blocks,
        "load_peak_bytes": load_peak - before,
        "loaded_bytes": loaded - before,
        "step_bytes": most - loaded,
    }


def fill(engine: Engine, max_num_batched_tokens: int) -> None:
    """Fill all slots of a linear cache, which computes behind computed tokens only; a paged one needs nothing."""
    spec = engine.spec
    if spec.block_size < spec.max_model_len:
        return
    longest = spec.max_model_len - 1
    chunk = min(max_num_batched_tokens, longest)
    for start in range(0, longest, chunk):
        engine.step([SequenceStep([0] * min(chunk, longest - start), start, [0])])
    engine.copy_blocks([(0, slot) for slot in range(1, spec.num_blocks)])


def steps(engine: Engine, max_num_seqs: int, max_num_batched_tokens: int) -> list[list[SequenceStep]]:
    """Decode steps of 1 to max_num_seqs sequences, prefill chunks of one, and the largest step at the longest context.

    Sequences share the blocks of a paged cache, whose content does not matter here, and have a slot each in a linear
    one. Their tokens are spread over the vocabulary, so that the embedding is read as requests read it.
    """
    spec = engine.spec

    def sequences(count: int, num_tokens: int, past: int) -> list[SequenceStep]:
        blocks = range(-(-(past + num_tokens) // spec.block_size))
        token_ids = [index * spec.vocab_size // num_tokens for index in range(num_tokens)]
        tables = [[(first + block) % spec.num_blocks for block in blocks] for first in range(count)]
        return [SequenceStep(token_ids, past, table) for table in tables]

    longest = spec.max_model_len - 1
    decodes = [sequences(count, 1, longest) for count in sizes(max_num_seqs)]
    chunk = min(max_num_batched_tokens, longest)
    prefills = [sequences(1, count, longest - count) for count in sizes(chunk)]
    shared = max_num_batched_tokens // max_num_seqs
    return [*decodes, *prefills, sequences(max_num_seqs, min(shared, longest), 0)]


def sizes(most: int) -> list[int]:
    """At most MOST_SIZES evenly spaced numbers up to `most`, which is the last one."""
    count = min(most, MOST_SIZES)
    return [most * (index + 1) // count for index in range(count)]


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))))

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

from tritonforge.engines.base import Engine, SequenceStep
from tritonforge.errors import EngineFailure
from tritonforge.memory.available import resident_bytes

MOST_SIZES = 32
"""Step sizes tried of each kind; where there are more, evenly spaced ones stand for all."""


def measure(target: str, folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """Bytes that the engine in `folder` takes with decoder.json's `config`.

    A paged cache is made for one sequence only; a linear one, where each has a slot of its own, as large as it is.

    num_blocks: its KV blocks. load_peak_bytes: the most while it opens, with KV for one sequence. loaded_bytes: once it
    is open. step_bytes: what steps add, up to the largest ones with the longest context.
    """
    measured = _run("probe", target, folder, config)
    if is_linear(config["engine_config"]):
        one_slot = {**config, "engine_config": {**config["engine_config"], "num_blocks": 1}}
        measured["load_peak_bytes"] = _run("probe_load", target, folder, one_slot)["load_peak_bytes"]
    return measured


def is_linear(engine_config: dict[str, Any]) -> bool:
    """Whether a block is one sequence's slot."""
    return engine_config["block_size"] == engine_config["max_model_len"]


def _run(function: str, target: str, folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """What a function of this module returns in a process of its own."""
    script, place = str(Path(__file__).absolute()), str(Path(folder).absolute())
    done = subprocess.run(
        [sys.executable, script, function, target, place, json.dumps(config)], capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EngineFailure(f"the memory of the compiled engine could not be measured: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def probe_load(target: str, folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """Bytes that opening the engine takes in this process: load_peak_bytes and loaded_bytes."""
    return _open(target, folder, config)[1]


def probe(target: str, folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """What `measure` returns, taken in this process."""
    engine, measured = _open(target, folder, config)
    loaded, _ = resident_bytes()
    limits = config["scheduler"]
    if is_linear(config["engine_config"]):
        fill(engine, limits["max_num_batched_tokens"])
    most = max(loaded, resident_bytes()[0])
    for step in steps(engine, limits["max_num_seqs"], limits["max_num_batched_tokens"]):
        engine.step(step)
        most = max(most, resident_bytes()[0])
    return {"num_blocks": engine.spec.num_blocks, **measured, "step_bytes": most - loaded}


def _open(target: str, folder: Path, config: dict[str, Any]) -> tuple[Engine, dict[str, int]]:
    """The open engine, a paged one with KV for one sequence, and what opening it took."""
    module = import_module(f"target_{target}")
    module.import_engine()
    engine_config = {name: value for name, value in config["engine_config"].items() if name != "fit_memory"}
    if not is_linear(engine_config):
        engine_config["num_blocks"] = -(-engine_config["max_model_len"] // engine_config["block_size"])
    before, _ = resident_bytes()
    engine = module.open_engine(folder, engine_config)
    loaded, peak = resident_bytes()
    return engine, {"load_peak_bytes": peak - before, "loaded_bytes": loaded - before}


def fill(engine: Engine, max_num_batched_tokens: int) -> None:
    """Fill all slots of a linear cache: it computes behind computed tokens only."""
    spec = engine.spec
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
    function, target, folder, config = sys.argv[1:]
    print(json.dumps({"probe": probe, "probe_load": probe_load}[function](target, Path(folder), json.loads(config))))

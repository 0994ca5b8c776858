"""What sampling a batch of 16 rows costs in ms, for each option alone and for heavy pairs, beside the engine's step.

python -m benchmarks.sampling RELEASE [--repeats N]

Logits of two kinds: real ones, of the release's engine inside a text, and flat ones, normal with a deviation of 2.5, of
which top_p 0.95 keeps thousands. In each repeat all cases take turns, so a drift of the machine meets all of them, and
each starts with cold caches, as behind an engine's step.
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from tritonforge.decoder import DecoderConfig, load_engine
from tritonforge.engines.base import Engine, SequenceStep
from tritonforge.generate_request import SamplingParams
from tritonforge.release import Release
from tritonforge.sampling.logits import History, needs_history
from tritonforge.sampling.sampling import Draw, sample
from tritonforge.text import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "build" / "data" / "quality" / "prose.txt"
ROWS = 16
CONTEXT = 200
SHARE = 0.05
"""Of the engine's step that a batch's sampling may cost."""

BIASES = tuple((token_id, 1.0) for token_id in range(100, 1124))
WORDS = tuple((token_id, token_id + 1) for token_id in range(64)) + tuple((token_id,) for token_id in range(500, 564))
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}

CASES: dict[str, dict] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "top_k 1": {"temperature": 1.0, "top_k": 1},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_k 1000": {"temperature": 1.0, "top_k": 1000},
    "top_k 10000": {"temperature": 1.0, "top_k": 10000},
    "top_p 0.5": {"temperature": 1.0, "top_p": 0.5},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "top_p 0.95, temperature 1.5": {"temperature": 1.5, "top_p": 0.95},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "min_p 0.0001": {"temperature": 1.0, "min_p": 0.0001},
    "repetition_penalty, greedy": {"repetition_penalty": 1.2},
    "three penalties, greedy": PENALTIES,
    "1024 logit biases, greedy": {"logit_bias": BIASES},
    "128 bad words, greedy": {"bad_words": WORDS},
    "mask, greedy": {"mask": True},
    "mask of few, greedy": {"mask": False},
    "logprobs 0, greedy": {"logprobs": 0},
    "logprobs 20, greedy": {"logprobs": 20},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_k 1000, top_p 0.95": {"temperature": 1.0, "top_k": 1000, "top_p": 0.95},
    "min_p 0.05, top_p 0.95": {"temperature": 1.0, "min_p": 0.05, "top_p": 0.95},
    "three penalties, top_p 0.95": {"temperature": 1.0, "top_p": 0.95, **PENALTIES},
    "mask, top_p 0.95": {"temperature": 1.0, "top_p": 0.95, "mask": True},
    "mask of few, top_p 0.95": {"temperature": 1.0, "top_p": 0.95, "mask": False},
    "logprobs 5, top_p 0.95": {"temperature": 1.0, "top_p": 0.95, "logprobs": 5},
    "all of it": {
        "temperature": 0.8, "top_k": 200, "top_p": 0.95, "min_p": 0.01, "logit_bias": BIASES, "bad_words": WORDS,
        "mask": True, "logprobs": 5, **PENALTIES,
    },
}  # fmt: skip
"""Options by name; mask True allows half of all tokens, False one in 500."""


def masks(vocab_size: int) -> dict[bool, np.ndarray]:
    """Bitmasks that allow a random half of the tokens (True), and one in 500 (False)."""
    rng = np.random.default_rng(3)
    bits = {True: rng.random(vocab_size) < 0.5, False: rng.random(vocab_size) < 0.002}
    return {key: np.packbits(one, bitorder="little").view(np.int32) for key, one in bits.items()}


def draws(options: dict, token_ids: list[int], vocab_size: int) -> list[Draw]:
    """One Draw a row; histories hold 800 prompt tokens and 100 of output."""
    options = dict(options)
    mask = masks(vocab_size)[options.pop("mask")] if "mask" in options else None
    made = []
    for row in range(ROWS):
        params = SamplingParams(seed=row, **options)
        history = History(params, token_ids[row : row + 800]) if needs_history(params) else None
        for token_id in token_ids[800 : 900 if history else 800]:
            history.append(token_id)
        made.append(Draw(params, 100, history, mask=mask))
    return made


def real_logits(engine: Engine, token_ids: list[int]) -> np.ndarray:
    """[ROWS, vocab_size]: logits at every 16th token of a text, in one prefill."""
    blocks = range(-(-len(token_ids) // engine.spec.block_size))
    logits = engine.step([SequenceStep(token_ids, 0, blocks, 16 * ROWS)])
    return logits[::16].copy()


def step_ms(engine: Engine, token_ids: list[int], repeats: int) -> float:
    """Median milliseconds of a decode step of ROWS sequences at CONTEXT tokens."""
    size = -(-(CONTEXT + 1) // engine.spec.block_size)
    tables = [range(row * size, (row + 1) * size) for row in range(ROWS)]
    for table in tables:
        engine.step([SequenceStep(token_ids[:CONTEXT], 0, table)])
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        engine.step([SequenceStep([token_ids[CONTEXT]], CONTEXT, table) for table in tables])
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def measure(cases: dict[str, list[Draw]], logits: np.ndarray, repeats: int) -> dict[str, float]:
    """Median milliseconds of each case on a fresh copy of `logits`, caches cold; each repeat draws other numbers."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    work, other = np.empty_like(logits), np.zeros(1 << 24, np.float32)
    for repeat in range(repeats + 2):  # two to warm up
        for name, case in cases.items():
            made = [replace(draw, index=repeat) for draw in case]
            work[:] = logits
            other += 1.0
            start = time.perf_counter()
            sample(work, made)
            if repeat >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release")
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    folder = Release.open(arguments.release).model_repository / "decoder" / "1"
    config = DecoderConfig.read(folder / "decoder.json")
    engine = load_engine(config.engine, folder / "engine", config.engine_config)
    vocab_size = engine.spec.vocab_size
    token_ids = Tokenizer(folder).encode(TEXT.read_text(encoding="utf-8"))[:1000]
    kinds = {
        "real": real_logits(engine, token_ids[: 32 * ROWS]),
        "flat": np.random.default_rng(1).normal(0, 2.5, (ROWS, vocab_size)).astype(np.float32),
    }
    cases = {name: draws(options, token_ids, vocab_size) for name, options in CASES.items()}
    step = step_ms(engine, token_ids, arguments.repeats)
    results = {kind: measure(cases, logits, arguments.repeats) for kind, logits in kinds.items()}
    engine.close()
    print(
        f"engine step of {ROWS} sequences at {CONTEXT} tokens: {step:.1f} ms; {SHARE:.0%} of it: {SHARE * step:.2f}\n"
    )
    print(f"| ms per {ROWS} rows | {' | '.join(kinds)} | share of the step |\n|---|{'---|' * (len(kinds) + 1)}")
    for name in cases:
        columns = [results[kind][name] for kind in kinds]
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in columns)} | {max(columns) / step:.1%} |")


if __name__ == "__main__":
    main()

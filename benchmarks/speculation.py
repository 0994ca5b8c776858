"""Prompt lookup on and off, one request after the other or several at once, through the engine loop in this process.

python -m benchmarks.speculation RELEASE [...]          speed, acceptance and tokens on data/edit.toml and chat.toml
python -m benchmarks.speculation --exact RELEASE [...]  the same where no row depends on the others of its step
python -m benchmarks.speculation --cost RELEASE [...]   what a decode step with drafts costs: for StepCost

The variants take turns prompt by prompt, so a drift of the machine meets both. Greedy; a fresh pool for each answer, so
that no prefix cache helps. Tokens per second count whole requests, prefill included. Where the answers differ, the gap
tells how much the plain run preferred its own token, in logits. They may differ at near-ties: OpenVINO's CPU plugin
computes a row otherwise beside others when it quantizes activations (int8 weights) or computes in bfloat16, and a u8 KV
block is quantized again as it fills. --exact turns all three off: there the tokens must be the same.
"""

import argparse
import random
import statistics
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonforge.decoder import DecoderConfig, load_blocks, load_engine
from tritonforge.engines.base import Engine, SequenceStep
from tritonforge.generate_request import GenerateRequest
from tritonforge.loop import EngineLoop
from tritonforge.release import Release
from tritonforge.scheduling.scheduler import Scheduler
from tritonforge.scheduling.speculation import PRIOR, PromptLookup, Speculation
from tritonforge.text import Tokenizer

DATA = Path(__file__).parent / "data"
SETS = ("edit", "chat")
COST_CONTEXT = 300
EXACT = {
    "properties": {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"},
    "prefill_properties": {},
    "kv_cache_precision": "f32",
    "num_blocks": 64,
}


class SharedEngine:
    """An engine that outlives its loops; it can keep the logits of the steps that sample one row."""

    def __init__(self, engine: Engine) -> None:
        self.spec = engine.spec
        self.copy_blocks = engine.copy_blocks
        self._engine = engine
        self.kept: list | None = None

    def step(self, sequences):
        logits = self._engine.step(sequences)
        if self.kept is not None and len(logits) == 1:
            self.kept.append(logits[0].copy())
        return logits

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Answers:
    """What one run over some prompts gave: seconds from the first submission to the last token."""

    seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    draft_tokens: int
    accepted_tokens: int

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(map(len, self.token_ids))


class Bench:
    """One loaded release."""

    def __init__(self, release: Path, max_tokens: int, changes: dict[str, Any]) -> None:
        models = Release.open(release).model_repository
        folder = models / "decoder" / "1"
        self.config = DecoderConfig.read(folder / "decoder.json")
        self.engine = SharedEngine(
            load_engine(self.config.engine, folder / "engine", self.config.engine_config | changes)
        )
        self.max_tokens = max_tokens
        self._tokenizer = Tokenizer(models / "tokenizer" / "1")

    def prompts(self, name: str) -> list[tuple[int, ...]]:
        """Token ids of the prompts of a set, through the chat template."""
        texts = [one["text"].strip() for one in tomllib.loads((DATA / f"{name}.toml").read_text("utf-8"))["prompts"]]
        return [tuple(self._tokenizer.encode_chat([{"role": "user", "content": text}])) for text in texts]

    def run(self, prompts: Sequence[tuple[int, ...]], *, speculate: bool) -> Answers:
        """Answer `prompts`, all submitted at once, in a new loop."""
        speculation = Speculation(lambda: scheduler.num_running)
        scheduler = Scheduler(
            self.config.scheduler, load_blocks(self.engine.spec), speculation.propose if speculate else None
        )
        loop = EngineLoop(self.engine, scheduler, self._tokenizer.decode, self.config.stop_token_ids)
        answers: list[list[int]] = [[] for _ in prompts]
        errors: list[Exception] = []
        ended = threading.Semaphore(0)

        def sink(index):
            def take(generation, delta):
                answers[index].extend(delta.token_ids)
                if delta.error is not None:
                    errors.append(delta.error)
                if delta.final:
                    ended.release()

            return take

        loop.start()
        start = time.perf_counter()
        for index, prompt in enumerate(prompts):
            loop.submit(GenerateRequest(prompt, self.max_tokens), sink(index))
        for _ in prompts:
            ended.acquire()
        seconds = time.perf_counter() - start
        loop.drain(0)
        if errors:
            raise errors[0]
        tokens = tuple(map(tuple, answers))
        return Answers(seconds, tokens, scheduler.num_draft_tokens, scheduler.num_accepted_tokens)

    def gap(self, prompt: tuple[int, ...], plain: Sequence[int], drafted: Sequence[int]) -> float:
        """How many logits the plain run put its own token before the other one, where the answers begin to differ."""
        self.engine.kept = []
        again = self.run([prompt], speculate=False).token_ids[0]
        rows, self.engine.kept = self.engine.kept, None
        assert again == tuple(plain), "the plain answer is not reproducible"
        first = next(i for i, pair in enumerate(zip(plain, drafted, strict=False)) if pair[0] != pair[1])
        return float(rows[first][plain[first]] - rows[first][drafted[first]])


def compare(bench: Bench, name: str, prompts: list[tuple[int, ...]], repeats: int, concurrency: int) -> None:
    """Print the ratio of the variants on the prompts of the set `name`."""
    groups = [prompts[start : start + concurrency] for start in range(0, len(prompts), concurrency)]
    bench.run(groups[0], speculate=True)
    ratios, runs = [], {}
    for repeat in range(repeats):
        taken: dict[bool, list[Answers]] = {False: [], True: []}
        for group in groups:
            for speculate in (False, True) if repeat % 2 == 0 else (True, False):
                taken[speculate].append(bench.run(group, speculate=speculate))
        speed = {
            on: sum(run.num_tokens for run in all_) / sum(run.seconds for run in all_) for on, all_ in taken.items()
        }
        ratios.append(speed[True] / speed[False])
        runs = taken
        print(f"  {name} repeat {repeat + 1}: off {speed[False]:.1f}, on {speed[True]:.1f} tok/s", flush=True)
    single = [on.num_tokens / on.seconds * off.seconds / off.num_tokens for off, on in zip(*runs.values(), strict=True)]
    drafts, accepted = (sum(getattr(run, f"{kind}_tokens") for run in runs[True]) for kind in ("draft", "accepted"))
    print(
        f"{name}, {concurrency} at once: ratio {statistics.median(ratios):.2f}, "
        f"{min(ratios):.2f} to {max(ratios):.2f}, least of a group {min(single):.2f}; "
        f"accepted {accepted} of {drafts} draft tokens"
    )
    plain, drafted = ([ids for run in runs[on] for ids in run.token_ids] for on in (False, True))
    differing = [case for case in zip(prompts, plain, drafted, strict=True) if case[1] != case[2]]
    print(f"  {len(prompts) - len(differing)} of {len(prompts)} answers have the same tokens")
    if differing and concurrency == 1:
        gaps = sorted(bench.gap(*case) for case in differing)
        print("  gaps at the first difference, in logits:", " ".join(f"{gap:.3f}" for gap in gaps))
    print("  right guesses by length of the match:", rates(prompts, plain), flush=True)


def rates(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> str:
    """Share of right guesses after a match of 1, 2, ... tokens, with their number: for PRIOR."""
    hits, guesses = defaultdict(int), defaultdict(int)
    for prompt, answer in zip(prompts, answers, strict=True):
        lookup = PromptLookup(prompt)
        for token_id in answer:
            guesses[lookup.match] += 1
            hits[lookup.match] += lookup.propose(1) == [token_id]
            lookup.append(token_id)
    lengths = range(1, len(PRIOR) + 1)
    return ", ".join(f"{length}: {hits[length] / guesses[length]:.2f} of {guesses[length]}" for length in lengths)


def measure_cost(bench: Bench, repeats: int) -> None:
    """Print what decode steps of n sequences with k draft tokens each took, after a step of the same shape and another.

    The least of the repeats, over that of a plain step of one sequence: what runs beside it only makes a step longer.
    """
    rng = random.Random(1)
    spec = bench.engine.spec

    def tokens(count: int) -> list[int]:
        return [rng.randrange(spec.vocab_size) for _ in range(count)]

    width = -(-(COST_CONTEXT + 16) // spec.block_size)
    tables = [range(index * width, (index + 1) * width) for index in range(16)]
    for table in tables:
        bench.engine.step([SequenceStep(tokens(COST_CONTEXT), 0, table)])
    cases = [(n, k) for n in (1, 2, 4, 8, 16) for k in (0, 1, 2, 4, 8, 16) if k < 16 or n < 8]
    seconds = {case: ([], []) for case in cases}
    for _ in range(repeats):
        for n, k in rng.sample(cases, len(cases)):
            steps = [SequenceStep(tokens(1 + k), COST_CONTEXT - 1, table, 1 + k) for table in tables[:n]]
            for taken in seconds[n, k]:
                start = time.perf_counter()
                bench.engine.step(steps)
                taken.append(time.perf_counter() - start)
    unit = min(seconds[1, 0][1])
    print(
        f"plain step of one sequence, context {COST_CONTEXT}: {unit * 1e3:.1f} ms; in that unit, same shape (another):"
    )
    for n in (1, 2, 4, 8, 16):
        row = (
            f"{k}: {min(same) / unit:.2f} ({min(other) / unit:.2f})"
            for (m, k), (other, same) in seconds.items()
            if m == n
        )
        print(f"  {n:2} sequences, draft tokens each: " + ", ".join(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="+", type=Path)
    parser.add_argument("--cost", action="store_true", help="measure step durations only")
    parser.add_argument("--exact", action="store_true", help="float32, no dynamic quantization; for at most 4 at once")
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--prompts", type=int, help="use so many prompts of each set (default: all)")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many prompts before them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()
    for release in options.releases:
        print(f"### {release.name}", flush=True)
        bench = Bench(release, options.max_tokens, EXACT if options.exact else {})
        if options.cost:
            measure_cost(bench, options.repeats)
            continue
        for name in options.sets:
            prompts = bench.prompts(name)[options.skip :][: options.prompts]
            compare(bench, name, prompts, options.repeats, options.concurrency)


if __name__ == "__main__":
    main()

"""The one workload that all contestants of a benchmark run, and the figures that each of them reports.

Prompts are the same for all, and none is used twice, so that no prefix cache can help.
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from loadtests.prompts import exact_prompt


@dataclass(frozen=True)
class Prompt:
    """One prompt as text and as the token ids that the release's tokenizer makes of it."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Workload:
    """`warmup` is not measured; `batch` is sent all at once; `single` one after the other. Greedy, ends ignored."""

    max_tokens: int
    warmup: list[Prompt]
    batch: list[Prompt]
    single: list[Prompt]

    def write(self, path: Path) -> None:
        """As JSON, for the contestants' processes."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Workload":
        """What `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        groups = {name: [Prompt(**one) for one in values[name]] for name in ("warmup", "batch", "single")}
        return cls(max_tokens=values["max_tokens"], **groups)


def build_workload(
    tokenizer_file: Path, *, seed: int, concurrency: int, prompt_tokens: int, max_tokens: int
) -> Workload:
    """Random words of exactly `prompt_tokens` tokens each."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    rng = random.Random(seed)

    def prompt() -> Prompt:
        count: Callable[[str], int] = lambda text: len(tokenizer.encode(text).ids)  # noqa: E731
        text = exact_prompt(count, rng, f"{rng.getrandbits(32):08x}:", prompt_tokens)
        return Prompt(text, tokenizer.encode(text).ids)

    return Workload(
        max_tokens=max_tokens,
        warmup=[prompt() for _ in range(concurrency)],
        batch=[prompt() for _ in range(concurrency)],
        single=[prompt() for _ in range(5)],
    )


@dataclass(frozen=True)
class Figures:
    """What one run of a contestant measured.

    tokens_per_s: output tokens of the batch over the time from its submission to its last token. tpot_ms and ttft_ms:
    medians over the single requests, TPOT as (last token - first token) / (tokens - 1).
    outside_engine_ms: median TTFT minus the time in queue and prefill; None where client and engine are one process.
    """

    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float
    outside_engine_ms: float | None = None

    def print(self) -> None:
        """As one line of JSON: how a contestant's process reports."""
        print(json.dumps(asdict(self)), flush=True)

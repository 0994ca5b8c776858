"""What structured output costs: compile time, masks, and the time that 16 streams add to a step.

.venv/bin/python -m benchmarks.structured artifacts/releases/smollm2-135m-int8

Grammars are made of the schemas in tests/unit/schemas. Answers are random walks over the masks, so their tokens are
less alike than a model's. xgrammar is measured beside llguidance where it can be imported (it needs torch), jsonschema
judges the answers of both where it can.
"""

import argparse
import importlib.util
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tritonforge.structured.constraints import Grammars
from tritonforge.structured.vocabulary import allowed_ids, apply_mask

SCHEMAS = Path(__file__).resolve().parent.parent / "tests" / "unit" / "schemas"
STREAMS = 16
STEPS = 200
ENGINE_MS = 33.0
"""A step of the default release at 16 streams."""
ANSWERS = 8
MAX_TOKENS = 200


class Walker(Protocol):
    """One answer on its way."""

    def mask(self) -> np.ndarray: ...
    def accept(self, token_id: int) -> None: ...


class Library(Protocol):
    """What is compared: compiles a JSON schema, and starts answers of it."""

    name: str

    def compile(self, schema: str) -> Callable[[], Walker]: ...


class LlGuidance:
    """Through tritonforge.structured, its worker thread included."""

    name = "llguidance"

    def __init__(self, tokenizer_file: Path, vocab_size: int, stops: list[int]) -> None:
        self.grammars = Grammars(tokenizer_file, vocab_size, stops)

    def compile(self, schema: str) -> Callable[[], Walker]:
        return self.grammars.compile("json_schema", schema).start


class XGrammar:
    """With its defaults, except that keywords are read as JSON schema says (strict_mode off), and without its cache."""

    name = "xgrammar"

    def __init__(self, tokenizer_file: Path, vocab_size: int, stops: list[int]) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        vocabulary = json.loads(tokenizer_file.read_text(encoding="utf-8"))["model"]["vocab"]
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.BYTE_LEVEL, vocab_size=vocab_size, stop_token_ids=stops, add_prefix_space=False
        )
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False, max_threads=2)
        self._words = -(-vocab_size // 32)

    def compile(self, schema: str) -> Callable[[], Walker]:
        compiled = self._compiler.compile_json_schema(schema, strict_mode=False)
        return lambda: _XGrammarWalker(self._xgrammar.GrammarMatcher(compiled), self._words)


class _XGrammarWalker:
    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self._mask = np.full((1, words), -1, np.int32)

    def mask(self) -> np.ndarray:
        self._mask.fill(-1)
        self._matcher.fill_next_token_bitmask(self._mask)
        return self._mask[0]

    def accept(self, token_id: int) -> None:
        if not self._matcher.accept_token(token_id):
            raise ValueError(f"token {token_id} was allowed and then refused")


@dataclass
class Measured:
    """Of one schema: compile time with the first mask, masks in ms (accepting the token included), and answers."""

    compile_ms: float
    mask_ms: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


class Draw:
    """The random walker: ends when it may, and prefers tokens that bring an end nearer."""

    def __init__(self, texts: list[str], stops: list[int], seed: int) -> None:
        self._closing = np.array([bool(text) and set(text) <= set('"}],: ') for text in texts])
        self._stops = stops
        self._random = random.Random(seed)

    def __call__(self, mask: np.ndarray) -> int | None:
        """A token that `mask` allows, or None for the end."""
        allowed = allowed_ids(mask)
        ends = np.isin(allowed, self._stops)
        if ends.all() or (ends.any() and self._random.random() < 0.3):
            return None
        allowed = allowed[~ends]
        closing = allowed[self._closing[allowed]]
        return int(self._random.choice(closing if len(closing) and self._random.random() < 0.7 else allowed))


def measure(library: Library, schema: str, draw: Callable[[int], Draw]) -> Measured:
    """Compile, then walk ANSWERS answers of at most MAX_TOKENS tokens; only finished ones are kept."""
    started = time.perf_counter()
    start = library.compile(schema)
    start().mask()
    measured = Measured((time.perf_counter() - started) * 1e3)
    for seed in range(ANSWERS):
        walker, next_token, answer = start(), draw(seed), []
        mask = walker.mask()
        while len(answer) < MAX_TOKENS and (token_id := next_token(mask)) is not None:
            answer.append(token_id)
            started = time.perf_counter()
            walker.accept(token_id)
            mask = walker.mask()
            measured.mask_ms.append((time.perf_counter() - started) * 1e3)
        if len(answer) < MAX_TOKENS:
            measured.answers.append(answer)
    return measured


def step_cost(library: Library, schemas: list[str], draw: Callable[[int], Draw]) -> dict[str, list[float]]:
    """What STREAMS answers add to a step, in ms: the part before the engine runs, and the part after it.

    Before: `accept` of all streams. After: waiting for the masks, and applying them to float32 logits. The stand-in for
    the engine keeps all cores busy without the GIL for ENGINE_MS.
    """
    starts = [library.compile(schema) for schema in schemas]
    streams = [starts[index % len(starts)]() for index in range(STREAMS)]
    draws = [draw(index) for index in range(STREAMS)]
    tokens = [draws[index](stream.mask()) for index, stream in enumerate(streams)]
    logits = np.zeros((STREAMS, len(streams[0].mask()) * 32), np.float32)
    cost: dict[str, list[float]] = {"before": [], "after": []}
    for step in range(STEPS):
        started = time.perf_counter()
        for index, token_id in enumerate(tokens):
            if token_id is None:
                streams[index] = starts[(index + step) % len(starts)]()
            else:
                streams[index].accept(token_id)
        cost["before"].append((time.perf_counter() - started) * 1e3)
        compute(ENGINE_MS)
        started = time.perf_counter()
        masks = [stream.mask() for stream in streams]
        for row, mask in zip(logits, masks, strict=True):
            apply_mask(row, mask)
        cost["after"].append((time.perf_counter() - started) * 1e3)
        tokens = [draws[index](mask) for index, mask in enumerate(masks)]
    return cost


def compute(milliseconds: float, _matrix: np.ndarray = np.ones((256, 256), np.float32)) -> None:  # noqa: B008
    """Multiply matrices for that long."""
    until = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < until:
        _matrix @ _matrix


def valid(schema: str, answers: list[str]) -> str:
    """How many of the answers the schema accepts, or - without jsonschema."""
    if importlib.util.find_spec("jsonschema") is None:
        return "-"
    from jsonschema import Draft202012Validator

    judge = Draft202012Validator(json.loads(schema))
    return f"{sum(judge.is_valid(json.loads(answer)) for answer in answers)}/{len(answers)}"


def percentile(values: list[float], share: float) -> float:
    """The value that `share` percent of the values do not exceed; 0 when there are none."""
    return float(np.percentile(values, share)) if values else 0.0


def libraries(tokenizer_file: Path, vocab_size: int, stops: list[int]) -> Iterator[Library]:
    """Those that can be imported."""
    yield LlGuidance(tokenizer_file, vocab_size, stops)
    if importlib.util.find_spec("xgrammar") is not None:
        yield XGrammar(tokenizer_file, vocab_size, stops)


def main() -> None:
    """Print one table of schemas and one of steps, for each library."""
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", type=Path)
    folder = parser.parse_args().release / "model_repository" / "decoder" / "1"
    config = json.loads((folder / "decoder.json").read_text())
    stops, vocab_size = config["stop_token_ids"], config["engine_config"]["vocab_size"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [tokenizer.decode([token_id]) for token_id in range(vocab_size)]
    schemas = {path.stem: path.read_text() for path in sorted(SCHEMAS.glob("*.json"))}

    def draw(seed: int) -> Draw:
        return Draw(texts, stops, seed)

    for library in libraries(folder / "tokenizer.json", vocab_size, stops):
        print(f"\n{library.name:20} compile ms  mask ms: median    p99    max   masks  valid answers")
        together: list[float] = []
        for name, schema in schemas.items():
            measured = measure(library, schema, draw)
            masks = measured.mask_ms
            together += masks
            answers = [tokenizer.decode(answer) for answer in measured.answers]
            print(
                f"{name:20} {measured.compile_ms:10.2f} {percentile(masks, 50):16.3f} {percentile(masks, 99):6.3f} "
                f"{percentile(masks, 100):6.3f} {len(masks):7}  {valid(schema, answers)}"
            )
        print(f"{'all':20} {'':10} {percentile(together, 50):16.3f} {percentile(together, 99):6.3f}")
        cost = step_cost(library, list(schemas.values()), draw)
        total = [before + after for before, after in zip(cost["before"], cost["after"], strict=True)]
        for part, values in (*cost.items(), ("before and after", total)):
            print(
                f"{STREAMS} streams, ms {part} the engine: median {percentile(values, 50):.2f}, "
                f"p99 {percentile(values, 99):.2f} ({percentile(values, 50) / ENGINE_MS:.1%} of {ENGINE_MS} ms)"
            )


if __name__ == "__main__":
    main()

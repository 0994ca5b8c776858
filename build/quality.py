"""Quality: how far a compiled model is from the float32 checkpoint, teacher-forced on texts of this repository.

The compile stage compares what it compiled with the stored reference (`measure`) and holds the figures against the
recipe's limits (`check`). It knows no engine but the Engine protocol.

At position t of a text a model gives the distribution of token t + 1. The reference holds its most likely tokens and
the rest is one lump, so the divergence is taken over these outcomes: a lower bound of the full one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)
import numpy as np
import recipe

from tritonforge.engines.base import Engine, SequenceStep
from tritonforge.errors import EngineFailure, TritonForgeError

TINY = 1e-12


class QualityTooLow(TritonForgeError):
    """What was compiled is farther from the reference than the recipe allows."""

    code = "INVALID_ARGUMENT"


@dataclass
class Totals:
    """Sums over predicted tokens: -log p (nats) of reference and model, divergence, equal top tokens."""

    tokens: int = 0
    reference_nll: float = 0.0
    nll: float = 0.0
    kl: float = 0.0
    agree: int = 0

    def add(self, other: "Totals") -> None:
        """Add another text's sums."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def report(self) -> dict[str, float]:
        """Means by name. perplexity = exp(mean -log p of the true next token), ratio = model / reference."""
        return {
            "tokens": self.tokens,
            "reference_perplexity": round(float(np.exp(self.reference_nll / self.tokens)), 4),
            "perplexity": round(float(np.exp(self.nll / self.tokens)), 4),
            "perplexity_ratio": round(float(np.exp((self.nll - self.reference_nll) / self.tokens)), 5),
            "mean_kl": round(self.kl / self.tokens, 6),
            "top1_agreement": round(self.agree / self.tokens, 5),
        }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural log-probabilities over the last axis, in float32."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def measure(engine: Engine, reference_file: Path, step_tokens: int) -> dict[str, Any]:
    """Compare `engine` with the stored reference: a report over all texts, and one for each text by name.

    Each text is fed as one sequence in chunks of at most `step_tokens`, through the KV cache as when serving; what does
    not fit max_model_len is cut.
    """
    with np.load(reference_file) as file:
        reference = dict(file)
    total, by_text = Totals(), {}
    position = 0
    for index, name in enumerate(reference["names"].tolist()):
        ids = reference["tokens"][reference["begins"][index] : reference["begins"][index + 1]].tolist()
        rows = slice(position, position + len(ids) - 1)
        position = rows.stop
        part = {key: reference[key][rows] for key in ("next_logp", "top_ids", "top_logp")}
        found = _compare(engine, ids, part, step_tokens)
        by_text[name] = found.report()
        total.add(found)
    return {**total.report(), "by_text": by_text}


def _compare(engine: Engine, ids: list[int], part: dict[str, np.ndarray], step_tokens: int) -> Totals:
    """Sums over one text; `part` holds the reference's rows for it."""
    totals = Totals()
    for start, logits in _chunks(engine, ids[:-1], step_tokens):
        rows = slice(start, start + len(logits))
        logp = log_softmax(np.asarray(logits, np.float32))
        if not np.isfinite(logp.max(axis=-1)).all():
            raise EngineFailure(f"the compiled model gives logits that are not finite at token {start} of a text")
        truth = np.asarray(ids[rows.start + 1 : rows.stop + 1])
        top_ids, top = part["top_ids"][rows], part["top_logp"][rows].astype(np.float64)
        mine = np.take_along_axis(logp, top_ids, axis=-1).astype(np.float64)
        rest, my_rest = (np.maximum(1.0 - np.exp(value).sum(axis=-1), TINY) for value in (top, mine))
        divergence = (np.exp(top) * (top - mine)).sum(axis=-1) + rest * np.log(rest / my_rest)
        totals.add(
            Totals(
                tokens=len(logits),
                reference_nll=-float(part["next_logp"][rows].sum(dtype=np.float64)),
                nll=-float(logp[np.arange(len(truth)), truth].sum(dtype=np.float64)),
                kl=float(divergence.sum()),
                agree=int((logp.argmax(axis=-1) == top_ids[:, 0]).sum()),
            )
        )
    return totals


def _chunks(engine: Engine, ids: list[int], step_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """(position, logits [tokens, vocab_size]) for every chunk of one sequence that has the KV pool for itself."""
    spec = engine.spec
    ids = ids[: min(spec.max_model_len, spec.num_blocks * spec.block_size)]
    table = list(range(-(-len(ids) // spec.block_size)))
    for start in range(0, len(ids), step_tokens):
        chunk = ids[start : start + step_tokens]
        yield start, engine.step([SequenceStep(chunk, start, table, len(chunk))])


def check(report: dict[str, Any], limits: recipe.Quality) -> None:
    """Raise QualityTooLow with every figure that is beyond the recipe's limits."""
    rules = (
        (
            "perplexity_ratio",
            "at most",
            limits.max_perplexity_ratio,
            report["perplexity_ratio"] > limits.max_perplexity_ratio,
        ),
        ("mean_kl", "at most", limits.max_mean_kl, report["mean_kl"] > limits.max_mean_kl),
        ("top1_agreement", "at least", limits.min_top1_agreement, report["top1_agreement"] < limits.min_top1_agreement),
    )
    broken = [f"{name} must be {word} {limit}, got {report[name]}" for name, word, limit, bad in rules if bad]
    if broken:
        raise QualityTooLow("quality is below the recipe's limits: " + "; ".join(broken))

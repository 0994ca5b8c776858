"""From logits to token ids and log-probabilities, for a whole batch: greedy, temperature, min_p, top_k, top_p. Pure.

As in vLLM's V1 sampler, log-probabilities are taken first, then the options of `logits` are applied, then temperature,
min_p, top_k and top_p. Whole rows are passed over as few times as possible: a row is 200 kB for a usual vocabulary, and
only a few elements of it matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from tritonforge.generate_request import SamplingParams
from tritonforge.sampling.logits import History, apply_mask, needs_history
from tritonforge.sampling.selection import block_sums, draw_nucleus, top_k

SPARSE = 16
"""Up to one in so many elements are gathered; more stay in place: finding them costs more than computing all."""

MAX_SCALE = 1e30
"""Largest 1 / temperature; beyond it a float32 product would overflow; only the largest logit is left long before."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row of logits is drawn with: `index` is the token's index in its answer.

    `history` must be the answer's when needs_history(params); `forbidden` ids must not be drawn now (end tokens before
    min_tokens); `mask` holds what structured output allows, see logits.apply_mask.
    """

    params: SamplingParams
    index: int
    history: History | None = None
    forbidden: Sequence[int] = ()
    mask: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token; when asked for, its log-probability and the most likely (token id, log-probability), best first.

    Log-probabilities are those of the model, before any option (vLLM's logprobs_mode "raw_logprobs").
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: np.ndarray, draws: Sequence[Draw]) -> list[Drawn | None]:
    """One token a row of `logits` [rows, vocab_size] float32.

    None: the row's largest logit is no number, or the options leave no token. Options may overwrite rows.
    Raises ValueError when a history is needed and missing.
    """
    best = logits.argmax(axis=1)
    usable = np.isfinite(logits[np.arange(len(best)), best]).tolist()
    return [
        _draw(row, draw, token_id) if is_usable else None
        for row, draw, token_id, is_usable in zip(logits, draws, best.tolist(), usable, strict=True)
    ]


def token_logprobs(rows: np.ndarray, token_ids: Sequence[int], top: int) -> list[Drawn | None]:
    """Log-probability of token_ids[i] under `rows`[i] [n, vocab_size] float32, and the `top` most likely, for prompts.

    None: the row's largest logit is no number.
    """
    told = []
    for row, token_id in zip(rows, token_ids, strict=True):
        best = int(row.argmax())
        told.append(_with_logprobs(row, best, token_id, top) if np.isfinite(row[best]) else None)
    return told


def _draw(row: np.ndarray, draw: Draw, best: int) -> Drawn | None:
    """Draw from one row whose largest element has index `best`; see sample."""
    params, raw = draw.params, row
    if draw.history is None and needs_history(params):
        raise ValueError(f"a draw with {params} needs the history of its answer")
    token_id: int | None = best
    if draw.history is not None or draw.mask is not None or draw.forbidden:
        row = row if params.logprobs is None else row.copy()
        token_id = _process(row, draw)
    if token_id is not None and params.temperature > 0.0:
        token_id = _draw_by_weight(row, float(row[token_id]), params, draw.index)
    if token_id is None or params.logprobs is None:
        return None if token_id is None else Drawn(token_id)
    return _with_logprobs(raw, best, token_id, params.logprobs)


def _process(row: np.ndarray, draw: Draw) -> int | None:
    """Apply the options that change logits, in place; the index of the largest one then (None: none is left)."""
    if draw.mask is not None:
        apply_mask(row, draw.mask)
    if draw.forbidden:
        row[list(draw.forbidden)] = -np.inf
    if draw.history is not None:
        draw.history.apply(row)
    best = int(row.argmax())
    return best if np.isfinite(row[best]) else None


def _with_logprobs(row: np.ndarray, best: int, token_id: int, top: int) -> Drawn:
    """`token_id` with its log-softmax in `row`, whose largest element has index `best`, and the `top` largest ones."""
    shift = _shift(float(row[best]), 1.0)
    weights = np.exp(row) if shift == 0.0 else np.exp(row - shift)
    normaliser = shift + log(block_sums(weights).sum(dtype=np.float64))
    most = top_k(row, top) if top else np.empty(0, np.int64)
    most = most[np.argsort(-row[most], kind="stable")]
    values = (row[most].astype(np.float64) - normaliser).tolist()
    return Drawn(token_id, float(row[token_id]) - normaliser, tuple(zip(most.tolist(), values, strict=True)))


def _draw_by_weight(row: np.ndarray, peak: float, params: SamplingParams, index: int) -> int:
    """Temperature, then min_p, top_k and top_p over what is left of `row`; `peak` is its largest element.

    min_p (Nguyen et al. 2024) keeps weights of at least min_p times the largest. That is a bound on logits: where few
    reach it, as for top_k, only their exponentials are taken; else it becomes a floor of the weights.
    """
    scale = min(1.0 / params.temperature, MAX_SCALE)
    shift = _shift(peak, scale)
    candidates, floor = None, 0.0
    if params.min_p > 0.0:
        bound = peak + params.temperature * log(params.min_p)
        reach = row >= bound
        if SPARSE * np.count_nonzero(reach) <= len(row):
            candidates = np.flatnonzero(reach)
            row = row[candidates]
        else:
            floor = exp((bound - shift) * scale) * (1.0 - 1e-6)  # its own rounding forbids no token
    if 0 < params.top_k < len(row):
        kept = top_k(row, params.top_k)
        row = row[kept]
        candidates = kept if candidates is None else candidates[kept]
    if shift != 0.0:
        row = row - shift
    if scale != 1.0:
        row = row * scale
    position = draw_nucleus(np.exp(row), floor, params.top_p, params.seed, index)
    return position if candidates is None else int(candidates[position])


def _shift(peak: float, scale: float) -> float:
    """What to take off logits so that neither exponentials of scaled logits nor their sums leave float32's range."""
    return 0.0 if -40.0 <= peak * scale <= 75.0 else peak

"""From logits to token ids and log-probabilities, for a whole batch: greedy, temperature, min_p, top_k, top_p. Pure.

A draw's random numbers are a function of the request's seed and the token's index alone, so batching and preemption
cannot change it. Whole rows are passed over as few times as possible: a row is 200 kB for a usual vocabulary,
and only a few elements of it matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from math import log
from struct import pack

import numpy as np

from tritonforge.logits import History, apply_mask, needs_history
from tritonforge.request import SamplingParams

BLOCK = 128
"""Elements that are summed in float32 before their sums are added in float64; a block is then searched alone."""

HEIGHTS = (128, 16, 4)
"""For its k largest elements, a row is searched as a table of so many rows: by column maxima, then few columns."""

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

    None: the row's largest logit is no number, or the options leave no token. Rows may be overwritten: a copy of each
    would cost more than the rest of the work. Raises ValueError when a history is needed and missing.
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


def uniform(seed: int, index: int, attempt: int = 0) -> float:
    """The uniform number in [0, 1) of token `index` in the answer of a request with `seed`: 53 bits of their hash."""
    key = pack("<QQQ", seed, index, attempt) if attempt else pack("<QQ", seed, index)
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def _draw(row: np.ndarray, draw: Draw, best: int) -> Drawn | None:
    """Draw from one row whose largest element has index `best`; see sample."""
    params, raw = draw.params, row
    if params.logprobs is not None:
        row = row.copy()
    token_id: int | None = best
    if draw.history is not None or draw.mask is not None or draw.forbidden:
        token_id = _process(row, draw)
    elif needs_history(params):
        raise ValueError(f"a draw with {params} needs the history of its answer")
    if token_id is not None and params.temperature > 0.0:
        token_id = _draw_by_weight(row, row[token_id], params, draw.index)
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
    weights = np.subtract(row, row[best])
    np.exp(weights, out=weights)
    normaliser = float(row[best]) + log(cumulative(weights)[-1])
    most = top_k(row, top) if top else np.empty(0, np.int64)
    most = most[np.argsort(-row[most], kind="stable")]
    values = (row[most].astype(np.float64) - normaliser).tolist()
    return Drawn(token_id, float(row[token_id]) - normaliser, tuple(zip(most.tolist(), values, strict=True)))


def _draw_by_weight(row: np.ndarray, peak: np.float32, params: SamplingParams, index: int) -> int:
    """Temperature, then min_p, top_k and top_p over what is left of `row`; `peak` is its largest element.

    min_p (Nguyen et al. 2024) keeps weights of at least min_p times the largest. That is a bound on logits, so it is
    applied, like top_k, before the exponentials are taken.
    """
    candidates = None
    if params.min_p > 0.0:
        candidates = np.flatnonzero(row >= peak + np.float32(params.temperature * log(params.min_p)))
        row = row[candidates]
    if 0 < params.top_k < len(row):
        kept = top_k(row, params.top_k)
        row = row[kept]
        candidates = kept if candidates is None else candidates[kept]
    weights = _unnormalised_softmax(row, peak, params.temperature)
    position = draw_nucleus(weights, params.top_p, params.seed, index)
    return position if candidates is None else int(candidates[position])


def _unnormalised_softmax(row: np.ndarray, peak: np.float32, temperature: float) -> np.ndarray:
    """exp((row - peak) / temperature), in place: the largest weight is 1."""
    np.subtract(row, peak, out=row)
    if temperature != 1.0:
        np.multiply(row, np.float32(min(1.0 / temperature, MAX_SCALE)), out=row)
    return np.exp(row, out=row)


def draw_nucleus(weights: np.ndarray, p: float, seed: int, index: int) -> int:
    """Draw from the nucleus (Holtzman et al. 2020): the fewest largest weights with a share of `p`, ties included.

    Nothing is sorted. A weight belongs to the nucleus when all larger ones together hold less than `p`; so one is drawn
    from all, and when it does not belong, another one from the larger ones, which hold the whole nucleus. What is
    accepted has the nucleus' distribution, after 1 + ln(1 / p) draws at most on average (the idea is FlashInfer's:
    "Sorting-Free GPU Kernels for LLM Sampling", 2025).
    """
    candidates = None
    wanted = 0.0
    for attempt in count():
        sums = cumulative(weights)
        position = inverse_cdf(weights, sums, uniform(seed, index, attempt))
        wanted = wanted or p * sums[-1]
        if p >= 1.0 or mass_above(weights, weights[position]) < wanted:
            break
        larger = np.flatnonzero(weights > weights[position])
        weights = weights[larger]
        candidates = larger if candidates is None else candidates[larger]
    return position if candidates is None else int(candidates[position])


def mass_above(weights: np.ndarray, bound: np.float32) -> float:
    """Sum of the `weights` [n] float32 that are larger than `bound`: blocks in float32, their sums in float64."""
    above = np.greater(weights, bound, out=np.empty_like(weights), casting="unsafe")  # 1.0 or 0.0
    whole = len(weights) - len(weights) % BLOCK
    blocks = np.einsum("ij,ij->i", above[:whole].reshape(-1, BLOCK), weights[:whole].reshape(-1, BLOCK))
    rest = np.einsum("i,i->", above[whole:], weights[whole:])
    return float(blocks.sum(dtype=np.float64)) + float(rest)


def top_k(row: np.ndarray, k: int) -> np.ndarray:
    """Indices of the `k` largest elements, in index order; among equal ones the first win. -inf is never among them.

    vLLM and transformers keep all that equal the k-th; with exactly k, top_k 1 is greedy also where logits tie.
    """
    candidates = _holding_top_k(row, k)
    values = row[candidates]
    if len(values) <= k:
        return candidates
    smallest = np.sort(values)[-k]
    keep = values >= smallest
    surplus = np.count_nonzero(keep) - k
    if surplus:
        keep[np.flatnonzero(values == smallest)[-surplus:]] = False
    return candidates[keep]


def _holding_top_k(row: np.ndarray, k: int) -> np.ndarray:
    """Indices, in order, of few elements that hold the `k` largest ones.

    The k-th largest column maximum bounds the k-th largest element from below, and no column with a smaller maximum
    holds one of them.
    """
    lowest = np.finfo(np.float32).min
    height = next((height for height in HEIGHTS if 4 * k * height <= len(row)), 1)
    if height == 1:
        return np.flatnonzero(row >= lowest)
    width = len(row) // height
    table, rest = row[: height * width].reshape(height, width), row[height * width :]
    maxima = table.max(axis=0)
    bound = max(np.sort(maxima)[-k], lowest)
    columns = np.flatnonzero(maxima >= bound)
    i, j = np.nonzero(table[:, columns] >= bound)
    return np.concatenate([i * width + columns[j], height * width + np.flatnonzero(rest >= bound)])


def cumulative(weights: np.ndarray) -> np.ndarray:
    """Sums of the first 1, 2, ... blocks of `weights` [n] float32, in float64; the last is the sum of all."""
    return np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)), dtype=np.float64)


def inverse_cdf(weights: np.ndarray, sums: np.ndarray, u: float) -> int:
    """The index that covers the share `u` in [0, 1) of the whole, when `weights` [n] are laid end to end.

    `sums` are their cumulative ones: the block is found among them, then the element in its block.
    """
    block = _covering(sums, u)
    before = sums[block - 1] if block else 0.0
    share = (u * sums[-1] - before) / (sums[block] - before)
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    return block * BLOCK + _covering(np.cumsum(inside, dtype=np.float64), share)


def _covering(cumulative: np.ndarray, u: float) -> int:
    """First index at which `cumulative` exceeds the share `u` of its last; never one whose own weight is zero."""
    found = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(found, int(np.searchsorted(cumulative, cumulative[-1])))

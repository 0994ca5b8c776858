"""From logits to token ids: greedy, temperature, top-k and top-p, for a whole batch. Pure and free of state.

A draw's random number is a function of the request's seed and the token's index alone, so batching and preemption
cannot change it. Whole rows are passed over as few times as possible: a row is 200 kB for a usual vocabulary,
and only a few elements of it matter.
"""

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

import numpy as np

from tritonforge.request import SamplingParams

ROWS = 128
"""A long array of n elements is searched as [ROWS, n / ROWS]: column maxima or sums first, then one column."""

MAX_SCALE = 1e30
"""Largest 1 / temperature; beyond it a float32 product would overflow; only the largest logit is left long before."""


def sample(logits: np.ndarray, params: Sequence[SamplingParams], indices: Sequence[int]) -> list[int | None]:
    """One token id a row of `logits` [rows, vocab_size] float32; `indices` are the tokens' indices in their answers.

    A row whose largest logit is no number gives None. Rows that are not greedy may be overwritten: a copy of each would
    cost more than the rest of the work.
    """
    best = logits.argmax(axis=1)
    largest = logits[np.arange(len(best)), best]
    tokens: list[int | None] = best.tolist()
    for row, (one, index) in enumerate(zip(params, indices, strict=True)):
        if not np.isfinite(largest[row]):
            tokens[row] = None
        elif one.temperature > 0.0:
            tokens[row] = _draw(logits[row], largest[row], one, index)
    return tokens


def uniform(seed: int, index: int) -> float:
    """The uniform number in [0, 1) of token `index` in the answer of a request with `seed`: 53 bits of their hash."""
    digest = blake2b(pack("<QQ", seed, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(row: np.ndarray, peak: np.float32, params: SamplingParams, index: int) -> int:
    """Temperature, then top-k, then top-p over what is left, then the inverse of the cumulative distribution.

    `peak` is the largest element of `row`.
    """
    candidates = None
    if 0 < params.top_k < len(row):
        candidates = top_k(row, params.top_k)
        row = row[candidates]
    weights = _unnormalised_softmax(row, peak, params.temperature)
    if params.top_p < 1.0:
        kept = top_p(weights, params.top_p)
        candidates = kept if candidates is None else candidates[kept]
        weights = weights[kept]
    position = inverse_cdf(weights, uniform(params.seed, index))
    return position if candidates is None else int(candidates[position])


def _unnormalised_softmax(row: np.ndarray, peak: np.float32, temperature: float) -> np.ndarray:
    """exp((row - peak) / temperature), in place: the largest weight is 1."""
    np.subtract(row, peak, out=row)
    if temperature != 1.0:
        np.multiply(row, np.float32(min(1.0 / temperature, MAX_SCALE)), out=row)
    return np.exp(row, out=row)


def top_k(row: np.ndarray, k: int) -> np.ndarray:
    """Indices of the `k` largest elements, in index order; among equal ones the first win.

    The k-th largest column maximum bounds the k-th largest element from below, so few elements are left to sort.
    """
    maxima = row.reshape(ROWS, -1).max(axis=0) if len(row) % ROWS == 0 else row
    bound = np.partition(maxima, -k)[-k] if k <= len(maxima) else row.min()
    candidates = np.flatnonzero(row >= bound)
    order = np.argsort(-row[candidates], kind="stable")[:k]
    return np.sort(candidates[order])


def top_p(weights: np.ndarray, p: float) -> np.ndarray:
    """Indices of the nucleus (Holtzman et al. 2020), in index order: the fewest largest weights with a share of `p`.

    `weights` [n] are unnormalised, the largest is 1; all that equal the smallest weight of the nucleus belong to it.
    Only the weights over a threshold are sorted; a lower one is tried when they do not hold the nucleus.
    """
    wanted = p * float(weights.sum(dtype=np.float32 if len(weights) % ROWS == 0 else np.float64))
    for threshold in (3e-3, 1e-4, 0.0):
        candidates = np.flatnonzero(weights >= threshold)
        inside = weights[candidates]
        falling = np.sort(inside)[::-1]
        mass = np.cumsum(falling, dtype=np.float64)
        if mass[-1] >= wanted:
            break
    smallest = falling[min(int(np.searchsorted(mass, wanted)), len(falling) - 1)]
    return candidates[inside >= smallest]


def inverse_cdf(weights: np.ndarray, u: float) -> int:
    """The index that covers the share `u` in [0, 1) of the whole, when `weights` [n] are laid end to end.

    A long array is laid out column by column of [ROWS, n / ROWS], any other in index order.
    """
    if len(weights) % ROWS:
        return _covering(np.cumsum(weights, dtype=np.float64), u)
    table = weights.reshape(ROWS, -1)
    totals = np.cumsum(table.sum(axis=0), dtype=np.float64)
    column = _covering(totals, u)
    before = totals[column - 1] if column else 0.0
    share = (u * totals[-1] - before) / (totals[column] - before)
    row = _covering(np.cumsum(table[:, column], dtype=np.float64), share)
    return row * table.shape[1] + column


def _covering(cumulative: np.ndarray, u: float) -> int:
    """First index at which `cumulative` exceeds the share `u` of its last; never one whose own weight is zero."""
    found = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(found, int(np.searchsorted(cumulative, cumulative[-1])))

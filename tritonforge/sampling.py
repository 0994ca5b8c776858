"""From logits to token ids: greedy, temperature, top-k and top-p, for a whole batch. Pure and free of state.

The random number of a draw is a function of the request's seed and the token's index (a counter-based generator: Salmon
et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), so batching and preemption cannot change what is drawn.
"""

from collections.abc import Sequence

import numpy as np

from tritonforge.errors import EngineFailure
from tritonforge.request import SamplingParams

GROUP = 128
"""Elements per group when a row is searched through group maxima or sums instead of sorted."""

MAX_SCALE = 1e30
"""Largest 1 / temperature; beyond it a float32 product would overflow; only the largest logit is left long before."""


def sample(logits: np.ndarray, params: Sequence[SamplingParams], indices: Sequence[int]) -> list[int]:
    """One token id a row of `logits` [rows, vocab_size] float32; `indices` are the tokens' indices in their answers.

    Rows that are not greedy may be overwritten: a copy of each would cost more than the rest of the work. Raises
    EngineFailure when a row's largest logit is no number.
    """
    best = logits.argmax(axis=1)
    finite = np.isfinite(logits[np.arange(len(best)), best])
    if not finite.all():
        raise EngineFailure(f"the engine computed logits that are no numbers, in row {int(np.argmin(finite))}")
    return [
        greedy if one.temperature == 0.0 else _draw(row, one, index)
        for greedy, row, one, index in zip(best.tolist(), logits, params, indices, strict=True)
    ]


def uniform(seed: int, index: int) -> float:
    """The uniform number in [0, 1) of token `index` in the answer of a request with `seed`."""
    return np.random.Generator(np.random.Philox(key=[seed, index])).random()


def _draw(row: np.ndarray, params: SamplingParams, index: int) -> int:
    """Temperature, then top-k, then top-p over what is left, then the inverse of the cumulative distribution."""
    candidates = None
    if 0 < params.top_k < len(row):
        candidates = top_k(row, params.top_k)
        row = row[candidates]
    weights = _unnormalised_softmax(row, params.temperature)
    if params.top_p < 1.0:
        kept = top_p(weights, params.top_p)
        candidates = kept if candidates is None else candidates[kept]
        weights = weights[kept]
    position = inverse_cdf(weights, uniform(params.seed, index))
    return position if candidates is None else int(candidates[position])


def _unnormalised_softmax(row: np.ndarray, temperature: float) -> np.ndarray:
    """exp((row - max) / temperature), in place: the largest weight is 1."""
    np.subtract(row, row.max(), out=row)
    np.multiply(row, np.float32(min(1.0 / temperature, MAX_SCALE)), out=row)
    return np.exp(row, out=row)


def top_k(row: np.ndarray, k: int) -> np.ndarray:
    """Indices of the `k` largest elements, in index order; among equal ones the first win.

    The k-th largest group maximum bounds the k-th largest element from below, so few elements are left to sort.
    """
    maxima = np.maximum.reduceat(row, np.arange(0, len(row), GROUP))
    bound = np.partition(maxima, -k)[-k] if k <= len(maxima) else row.min()
    candidates = np.flatnonzero(row >= bound)
    order = np.argsort(-row[candidates], kind="stable")[:k]
    return np.sort(candidates[order])


def top_p(weights: np.ndarray, p: float) -> np.ndarray:
    """Indices of the nucleus (Holtzman et al. 2020), in index order: the fewest largest weights with a share of `p`.

    `weights` [n] are unnormalised, the largest is 1; all that equal the smallest weight of the nucleus belong to it.
    Only the weights over a threshold are sorted; a lower one is tried when they do not hold the nucleus.
    """
    wanted = p * float(weights.sum(dtype=np.float64))
    for threshold in (3e-3, 1e-4, 0.0):
        largest = np.sort(weights[weights >= threshold])[::-1]
        mass = np.cumsum(largest, dtype=np.float64)
        if mass[-1] >= wanted:
            break
    smallest = largest[min(int(np.searchsorted(mass, wanted)), len(largest) - 1)]
    return np.flatnonzero(weights >= smallest)


def inverse_cdf(weights: np.ndarray, u: float) -> int:
    """The first index at which the cumulative weight of `weights` [n] exceeds the share `u` in [0, 1) of the whole."""
    starts = np.arange(0, len(weights), GROUP)
    totals = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = u * totals[-1]
    group = int(np.searchsorted(totals, target, side="right"))
    before = totals[group - 1] if group else 0.0
    inside = before + np.cumsum(weights[starts[group] : starts[group] + GROUP], dtype=np.float64)
    # Rounding may leave the group's own sum a little short of the target: then its last positive weight is meant.
    offset = min(
        int(np.searchsorted(inside, target, side="right")), int(np.flatnonzero(np.diff(inside, prepend=before))[-1])
    )
    return int(starts[group]) + offset

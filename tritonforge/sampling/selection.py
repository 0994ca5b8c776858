"""Which elements of a long row are kept or drawn, by few passes over it and without sorting it. Called by `sampling`.

A draw's random numbers are a function of the request's seed and the token's index alone, so batching and preemption
cannot change it.
"""

from hashlib import blake2b
from itertools import count
from struct import pack

import numpy as np

BLOCK = 128
"""Elements that are summed in float32 before their sums are added in float64; a block is then searched alone."""

HEIGHTS = (128, 16, 4)
"""For its largest elements, a row is looked at as a table of so many rows: the maxima of its columns come first."""


def uniform(seed: int, index: int, attempt: int = 0) -> float:
    """The uniform number in [0, 1) of token `index` in the answer of a request with `seed`: 53 bits of their hash."""
    key = pack("<QQQ", seed, index, attempt) if attempt else pack("<QQ", seed, index)
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def draw_nucleus(weights: np.ndarray, floor: float, p: float, seed: int, index: int) -> int:
    """Draw from the nucleus (Holtzman et al. 2020) of the `weights` [n] over `floor`: the fewest largest ones with a
    share of `p`, ties included.

    Nothing is sorted. A weight belongs to the nucleus when all larger ones together hold less than `p`; so one is drawn
    from all, and when it does not belong, another one from the larger ones, which hold the whole nucleus. What is
    accepted has the nucleus' distribution, after 1 + ln(1 / p) draws at most on average (the idea is FlashInfer's:
    "Sorting-Free GPU Kernels for LLM Sampling", 2025).
    """
    sums = block_sums(weights, floor).cumsum(dtype=np.float64)
    wanted = p * float(sums[-1])
    for attempt in count():
        position = inverse_cdf(weights, floor, sums, uniform(seed, index, attempt))
        if p >= 1.0:
            return position
        floor = float(weights[position])
        sums = block_sums(weights, floor).cumsum(dtype=np.float64)
        if sums[-1] < wanted or not sums[-1]:  # nothing is left above it: also where weights underflow
            return position


def block_sums(weights: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """Sums of each BLOCK of the `weights` [n] >= 0 over `floor`, in float32; the last block may be shorter."""
    full = len(weights) // BLOCK
    sums = np.empty(-(-len(weights) // BLOCK), np.float32)
    if full:
        blocks = weights[: full * BLOCK].reshape(full, BLOCK)
        if floor > 0.0:
            above = np.greater(blocks, floor, out=np.empty_like(blocks), casting="unsafe")  # 1.0 or 0.0
            np.einsum("ij,ij->i", above, blocks, out=sums[:full])
        else:
            np.einsum("ij->i", blocks, out=sums[:full])
    if full < len(sums):
        rest = weights[full * BLOCK :]
        sums[full] = (rest * (rest > floor)).sum()
    return sums


def inverse_cdf(weights: np.ndarray, floor: float, sums: np.ndarray, u: float) -> int:
    """The index that covers the share `u` in [0, 1) of the whole, when the `weights` [n] over `floor` lie end to end.

    `sums` are the cumulative ones of their blocks: the block is found among them, then the element in its block.
    """
    block = _covering(sums, u)
    before = float(sums[block - 1]) if block else 0.0
    share = (u * float(sums[-1]) - before) / (float(sums[block]) - before)
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    if floor > 0.0:
        inside = inside * (inside > floor)
    return block * BLOCK + _covering(inside.cumsum(dtype=np.float64), share)


def _covering(cumulative: np.ndarray, u: float) -> int:
    """First index at which `cumulative` exceeds the share `u` of its last; never one whose own weight is zero."""
    total = float(cumulative[-1])
    found = int(cumulative.searchsorted(u * total, side="right"))
    return found if found < len(cumulative) else int(cumulative.searchsorted(total))


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
    """Indices, in order, of elements that hold the `k` largest ones: few, unless `k` is a large part of them.

    The k-th largest of the columns' maxima bounds the k-th largest element from below.
    """
    bound = np.finfo(np.float32).min
    height = next((height for height in HEIGHTS if 2 * k * height <= len(row)), 0)
    if height:
        width = len(row) // height
        maxima = row[: height * width].reshape(height, width).max(axis=0)
        maxima.sort()
        bound = max(maxima[-k], bound)
    return np.flatnonzero(row >= bound)

"""SlotEngine: the linear engines' shared logic over a cache of token ids, deterministic and without a model.

Like the simulated engine it computes logits from what it reads back. It does no more than the logic asks for: padding
and dummies really write, and what a move or a narrower view was not told to keep is spoilt.
"""

from collections.abc import Sequence

import numpy as np

from tritonforge.engines.base import EngineSpec
from tritonforge.engines.linear import LinearEngine
from tritonforge.engines.linear_calls import CallLimits, LinearCall
from tritonforge.engines.simulated import logits_of

SPOILT = -7


class SlotEngine(LinearEngine):
    """LinearEngine whose rows hold token ids; `calls` are those made, `moved` counts positions that moved."""

    def __init__(self, spec: EngineSpec, limits: CallLimits) -> None:
        super().__init__(spec, limits)
        self._cache = np.full((spec.num_blocks, limits.views[0]), SPOILT)
        self.calls: list[LinearCall] = []
        self.moved = 0

    def run(self, call: LinearCall) -> np.ndarray:
        """Write every token of the call, padding and dummies too, then read what the wanted ones attend to."""
        self.calls.append(call)
        batch, tokens = call.input_ids.shape
        assert call.cache_len == self._cache.shape[1], "a call sees another cache length than the rows have"
        assert 0 <= call.first_row <= self.spec.num_blocks - batch
        rows = self._cache[call.first_row : call.first_row + batch]
        for row, start, ids in zip(rows, call.write_index, call.input_ids, strict=True):
            assert 0 <= start <= call.cache_len - tokens, "a call writes beyond the cache"
            row[start : start + tokens] = ids
        contexts = []
        for line, column in (divmod(int(flat), tokens) for flat in call.logit_rows):
            contexts.append(rows[line, : call.write_index[line] + column + 1].tolist())
        return logits_of(contexts, self.spec.vocab_size)

    def copy_rows(self, source: int, destination: int, num_tokens: int) -> None:
        """See LinearEngine.copy_rows."""
        self._cache[destination] = SPOILT
        self._cache[destination, :num_tokens] = self._cache[source, :num_tokens]
        self.moved += num_tokens

    def swap_rows(self, first: int, second: int, num_tokens: int) -> None:
        """See LinearEngine.swap_rows."""
        pair = self._cache[[second, first]]
        pair[:, num_tokens:] = SPOILT
        self._cache[[first, second]] = pair
        self.moved += 2 * num_tokens

    def set_view(self, cache_len: int, lengths: Sequence[int]) -> None:
        """See LinearEngine.set_view."""
        old, self._cache = self._cache, np.full((self.spec.num_blocks, cache_len), SPOILT)
        for row, length in enumerate(lengths):
            self._cache[row, :length] = old[row, :length]

    def close(self) -> None:
        """See Engine.close."""

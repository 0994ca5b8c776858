"""The simulated engine: deterministic logits without a model, for tests of everything above an engine.

It keeps token ids where a real engine keeps keys and values, and computes logits from what it reads back through the
block table. So a wrong block table, a block given to two requests, or a stale prefix changes tokens, as for real.
"""

from collections.abc import Sequence
from zlib import crc32

import numpy as np

from tritonforge.engines.base import EngineSpec, SequenceStep

UNWRITTEN = -1


class SimulatedEngine:
    """Engine protocol over a KV cache of token ids, [num_blocks, block_size] int64."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._cache = np.full((spec.num_blocks, spec.block_size), UNWRITTEN, np.int64)

    def step(self, sequences: Sequence[SequenceStep]) -> np.ndarray:
        """See Engine.step."""
        for sequence in sequences:
            self._write(sequence)
        rows = [
            self._logits(sequence, end)
            for sequence in sequences
            for end in range(_end(sequence) - sequence.num_logits + 1, _end(sequence) + 1)
        ]
        return np.stack(rows) if rows else np.zeros((0, self.spec.vocab_size), np.float32)

    def close(self) -> None:
        """See Engine.close."""

    def _slots(self, sequence: SequenceStep, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        table = np.asarray(sequence.block_table)
        return table[positions // self.spec.block_size], positions % self.spec.block_size

    def _write(self, sequence: SequenceStep) -> None:
        positions = np.arange(sequence.num_computed_tokens, _end(sequence))
        self._cache[self._slots(sequence, positions)] = sequence.token_ids

    def _logits(self, sequence: SequenceStep, end: int) -> np.ndarray:
        context = self._cache[self._slots(sequence, np.arange(end))]
        assert (context != UNWRITTEN).all(), "a step read KV that was never computed"
        return np.random.default_rng(crc32(context.tobytes())).random(self.spec.vocab_size, np.float32)


def _end(sequence: SequenceStep) -> int:
    return sequence.num_computed_tokens + len(sequence.token_ids)

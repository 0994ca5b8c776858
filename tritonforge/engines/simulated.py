"""The simulated engine: deterministic logits without a model, for tests of everything above an engine.

It keeps token ids where a real engine keeps keys and values, and computes logits from what it reads back through the
block table. So a wrong block table, a block given to two requests, or a stale prefix changes tokens, as for real.
"""

from array import array
from collections.abc import Sequence
from zlib import crc32

import numpy as np

from tritonforge.engines.base import EngineSpec, SequenceStep

UNWRITTEN = -1


class SimulatedEngine:
    """Engine protocol over a KV cache of token ids: a list of block_size ids for each block."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._cache = [[UNWRITTEN] * spec.block_size for _ in range(spec.num_blocks)]

    def step(self, sequences: Sequence[SequenceStep]) -> np.ndarray:
        """See Engine.step."""
        for sequence in sequences:
            self._write(sequence)
        return logits_of(
            [context for sequence in sequences for context in self._contexts(sequence)], self.spec.vocab_size
        )

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See Engine.copy_blocks."""
        for source, destination in copies:
            self._cache[destination][:] = self._cache[source]

    def close(self) -> None:
        """See Engine.close."""

    def _write(self, sequence: SequenceStep) -> None:
        size = self.spec.block_size
        for position, token_id in enumerate(sequence.token_ids, sequence.num_computed_tokens):
            self._cache[sequence.block_table[position // size]][position % size] = token_id

    def _contexts(self, sequence: SequenceStep) -> list[list[int]]:
        """What the last `num_logits` tokens attend to: the ids up to and with each of them."""
        end = sequence.num_computed_tokens + len(sequence.token_ids)
        context = [token_id for block in sequence.block_table for token_id in self._cache[block]][:end]
        assert UNWRITTEN not in context, "a step read KV that was never computed"
        return [context[:stop] for stop in range(end - sequence.num_logits + 1, end + 1)]


def logits_of(contexts: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """Logits [contexts, vocab_size] float32 in [0, 1): a hash of each context, mixed with each token id."""
    hashes = np.array([crc32(array("q", context)) for context in contexts], np.uint32).reshape(-1, 1)
    mixed = hashes ^ (np.arange(1, vocab_size + 1, dtype=np.uint32) * np.uint32(2654435769))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # the finalizer of MurmurHash3
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return (mixed >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)

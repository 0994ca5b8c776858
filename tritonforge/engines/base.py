"""What every engine offers: one step over a ragged batch, paged or linear KV cache, logits of the sampled rows.

The engine loop calls it; build scripts measure quality through it. An engine knows nothing of requests or scheduling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class EngineSpec:
    """The limits an engine was compiled for; the scheduler plans within them.

    `block_size` is in tokens and `num_blocks` counts the KV blocks of the pool: block ids are 0 to num_blocks - 1.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's share of a step: `token_ids` go to positions num_computed_tokens, num_computed_tokens + 1, ...

    `block_table` covers all positions up to the last one computed here. Logits are returned for the last `num_logits`
    tokens: 0 for a prefill chunk that is not the last, 1 for sampling, all of them when quality is measured.
    """

    token_ids: Sequence[int]
    num_computed_tokens: int
    block_table: Sequence[int]
    num_logits: int = 1


class Engine(Protocol):
    """One model with its KV cache. `step` is called by one thread at a time."""

    spec: EngineSpec

    def step(self, sequences: Sequence[SequenceStep]) -> np.ndarray:
        """Compute one step and return float32 logits [sum of num_logits, vocab_size], in the order of `sequences`.

        The array may be overwritten by the next step. Raises EngineFailure when the step cannot be computed.
        """
        ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks, (source, destination) pairs, in order. A linear cache copies slots."""
        ...

    def close(self) -> None:
        """Free the model and its KV cache; the engine is unusable afterwards."""
        ...

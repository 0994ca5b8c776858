"""The tokenizer's vocabulary as the grammar library sees it, and masks over it: one bit a token, for structured output.

A mask is int32 [ceil(vocab_size / 32)]; bit i of word w says whether token id 32w + i is allowed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask


def token_mask(token_ids: Iterable[int], words: int) -> np.ndarray:
    """The mask of `words` words that allows exactly `token_ids`."""
    flags = np.zeros(words * 32, np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def allowed_ids(mask: np.ndarray) -> np.ndarray:
    """The token ids that `mask` allows, ascending."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def apply_mask(logits: np.ndarray, mask: np.ndarray) -> None:
    """Set the logits [vocab_size] of all tokens that `mask` forbids to minus infinity, in place."""
    forbidden = np.unpackbits(~mask.view(np.uint8), count=len(logits), bitorder="little")
    np.copyto(logits, -np.inf, where=forbidden.view(bool))


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer as the library sees it, and the shape of a mask: `words` int32 words, bit i of word w is id 32w+i.

    `allowed` has the ids of tokenizer and logits set, `ends` the end tokens.
    """

    tokenizer: LLTokenizer
    words: int
    allowed: np.ndarray
    ends: np.ndarray

    @classmethod
    def read(cls, tokenizer_file: Path, vocab_size: int, stop_token_ids: Iterable[int]) -> "Vocabulary":
        """Raises ValueError when the library cannot read the tokenizer, or there is no end token."""
        stops = sorted(set(stop_token_ids))
        if not stops:
            raise ValueError("the model has no end token")
        tokenizer = LLTokenizer(tokenizer_file.read_text(encoding="utf-8"), eos_token=stops)
        known = min(vocab_size, tokenizer.vocab_size)
        words = -(-vocab_size // 32)
        return cls(tokenizer, words, token_mask(range(known), words), token_mask(stops, words))

    def mask(self, matcher: LLMatcher) -> np.ndarray:
        """The bitmask of the next token, int32 [words], read-only. Releases the GIL while it computes."""
        computed = np.zeros(max(self.words, -(-self.tokenizer.vocab_size // 32)), np.int32)
        own = computed[: -(-self.tokenizer.vocab_size // 32)]
        fill_next_token_bitmask(matcher, own[np.newaxis])
        mask = computed[: self.words] & self.allowed
        mask.flags.writeable = False
        return mask

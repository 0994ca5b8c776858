"""What a request's options do to a row of logits before a token is drawn from it; called by `sampling`, row by row.

Order and meaning are those of vLLM's V1 sampler (vllm/v1/sample/sampler.py): structured output's mask, bad words, end
tokens before min_tokens, logit_bias, then the penalties. A History holds what a request has seen, so that a step costs
a few operations on arrays as long as its distinct tokens, and no loop over its context.
"""

from collections.abc import Sequence

import numpy as np

from tritonforge.generate_request import SamplingParams

MASK_BYTES = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf)
MASK_BYTES = MASK_BYTES.astype(np.float32)
"""[256, 8]: what a byte of a mask adds to the logits of its 8 tokens, bit 0 first: 0 when allowed, else -inf."""


def penalizes(params: SamplingParams) -> bool:
    """Whether tokens seen before are drawn with other logits."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def needs_history(params: SamplingParams) -> bool:
    """Whether every Draw with `params` needs the request's History: for penalties, bad_words or logit_bias."""
    return bool(params.logit_bias or params.bad_words) or penalizes(params)


class History:
    """What one answer's logits depend on: its tokens so far, counted, and its options as arrays.

    The caller keeps one per answer, appends each output token once, and keeps it through preemption: it depends on
    tokens alone, never on what is computed.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._penalizes = penalizes(params)
        self._output_ids: list[int] = []
        # Distinct ids in the order of their first appearance; the prompt's matter to the repetition penalty alone.
        seen = dict.fromkeys(prompt_ids) if params.repetition_penalty != 1.0 else {}
        self._slots = {token_id: slot for slot, token_id in enumerate(seen)}
        self._ids = np.fromiter(seen, np.int64, len(seen))
        self._counts = np.zeros(len(seen), np.float32)
        biases = dict(params.logit_bias)
        self._biased = np.fromiter(biases, np.int64, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))
        self._never = np.array([word[0] for word in params.bad_words if len(word) == 1], np.int64)
        self._words: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for word in params.bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(word)

    def append(self, token_id: int) -> None:
        """Count one output token."""
        self._output_ids.append(token_id)
        if self._penalizes:
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._ids):
                room = max(slot, 64)
                self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
            self._ids[slot] = token_id
            self._counts[slot] += 1.0

    def apply(self, row: np.ndarray) -> None:
        """Forbid bad words, add logit_bias and take the penalties off `row` [vocab_size] float32, in place."""
        self._forbid_bad_words(row)
        if len(self._biased):
            row[self._biased] += self._biases
        if self._penalizes and self._slots:
            self._penalize(row)

    def _forbid_bad_words(self, row: np.ndarray) -> None:
        """Forbid the last token of each bad word whose other tokens end the output; as in vLLM, a prompt is no output.

        vllm/v1/sample/ops/bad_words.py is given output_token_ids; transformers' NoBadWords looks at the prompt too.
        """
        row[self._never] = -np.inf
        if self._output_ids:
            for word in self._words.get(self._output_ids[-1], ()):
                if tuple(self._output_ids[1 - len(word) :]) == word[:-1]:
                    row[word[-1]] = -np.inf

    def _penalize(self, row: np.ndarray) -> None:
        """Repetition over prompt and output (Keskar et al. 2019, CTRL), then OpenAI's two penalties over the output.

        repetition: l / r when l > 0, else l * r; frequency: l - f * count; presence: l - p when count > 0.
        """
        params, size = self._params, len(self._slots)
        ids, counts = self._ids[:size], self._counts[:size]
        values = row[ids]
        if params.repetition_penalty != 1.0:
            penalty = np.float32(params.repetition_penalty)
            values = np.where(values > 0.0, values / penalty, values * penalty)
        values -= np.float32(params.frequency_penalty) * counts
        values -= np.float32(params.presence_penalty) * (counts > 0.0)
        row[ids] = values


def apply_mask(row: np.ndarray, mask: np.ndarray) -> None:
    """Forbid what `mask`, int32 [ceil(vocab_size / 32)], does not allow: token i is bit i % 32 of word i // 32.

    Tokens beyond a shorter mask are forbidden: a tokenizer may know fewer tokens than the model has logits for.
    """
    size = min(len(row), 32 * len(mask))
    added = np.take(MASK_BYTES, mask.astype("<i4", copy=False).view(np.uint8), axis=0, mode="clip").reshape(-1)
    row[:size] += added[:size]
    row[size:] = -np.inf

"""LinearEngine: what engines with a linear KV cache share; each sequence has one slot, a row as long as the context.

ONNX Runtime's and TensorRT's engines derive from it and supply four verbs: run a call, copy and swap rows, and see
another length of the cache. The calls are made in linear_calls.py, places of slots in linear_rows.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from tritonforge.engines.base import EngineSpec, SequenceStep
from tritonforge.engines.linear_calls import Box, CallLimits, LinearCall, Share, boxes, make_call, positions_seen, split
from tritonforge.engines.linear_rows import SlotRows
from tritonforge.errors import EngineFailure, InvalidRequest

CACHE_LEN_MULTIPLE = 64
"""Cache lengths are multiples of it: so a row of 16-bit values begins at an address that TensorRT takes."""

SHRINK_FACTOR = 4
"""A shorter view must be so many times shorter: it has to pay for moving all rows, now and when it grows again."""


def cache_len_for(max_model_len: int, widest: int) -> int:
    """Positions of a row: `max_model_len`, and room for the padding of a call of `widest` tokens behind them."""
    return -(-(max_model_len + widest) // CACHE_LEN_MULTIPLE) * CACHE_LEN_MULTIPLE


class LinearEngine(ABC):
    """Engine protocol over a cache of num_blocks rows; a block is a slot, so block tables have one entry."""

    spec: EngineSpec

    def __init__(self, spec: EngineSpec, limits: CallLimits) -> None:
        """Raises InvalidRequest when the limits do not hold what `spec` promises."""
        if spec.block_size != spec.max_model_len:
            raise InvalidRequest(
                f"block_size must be max_model_len {spec.max_model_len} for a linear KV cache, got {spec.block_size}"
            )
        widest = max(limits.narrow_tokens, *limits.widths, 1)
        if limits.views[-1] < spec.max_model_len + widest:
            raise InvalidRequest(
                f"cache_len must be at least max_model_len {spec.max_model_len} and the widest padding {widest}, "
                f"got {limits.views[-1]}: the cache is too small"
            )
        self.spec = spec
        self._limits = limits
        self._rows = SlotRows(spec.num_blocks)
        self._view = limits.views[0]

    @abstractmethod
    def run(self, call: LinearCall) -> np.ndarray:
        """Compute `call`, past and present in place, and return float32 logits [len(call.logit_rows), vocab_size]."""

    @abstractmethod
    def copy_rows(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` positions of a row, in all layers."""

    @abstractmethod
    def swap_rows(self, first: int, second: int, num_tokens: int) -> None:
        """Exchange the first `num_tokens` positions of two rows, in all layers."""

    def set_view(self, cache_len: int, lengths: Sequence[int]) -> None:
        """Lay the rows out for calls that see `cache_len` positions, and keep the first lengths[row] of each row.

        An engine whose limits have one view only is never asked.
        """
        raise NotImplementedError

    def step(self, sequences: Sequence[SequenceStep]) -> np.ndarray:
        """See Engine.step."""
        self._check(sequences)
        for sequence in sequences:  # what is behind its computed tokens is dead
            self._rows.lengths[sequence.block_table[0]] = sequence.num_computed_tokens
        self._gather(sequences)
        computed = self._rows.lengths_by_row()
        for sequence in sequences:  # from here on dummies stay behind what the step writes
            self._rows.lengths[sequence.block_table[0]] += len(sequence.token_ids)
        made = self._boxes(sequences)
        self._see(max((positions_seen(box, self._rows) for box in made), default=0), computed)
        calls = [make_call(box, self._rows, self._view) for box in made]
        return self._run_all(calls, sum(sequence.num_logits for sequence in sequences))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See Engine.copy_blocks. When a copy fails, the slots that it was for hold nothing."""
        lengths = list(self._rows.lengths)
        for _, destination in copies:
            self._rows.lengths[destination] = 0
        for source, destination in copies:
            if source != destination and lengths[source]:
                self.copy_rows(self._rows.row(source), self._rows.row(destination), lengths[source])
            lengths[destination] = lengths[source]
        self._rows.lengths = lengths

    def _check(self, sequences: Sequence[SequenceStep]) -> None:
        """Refuse what would read or overwrite foreign keys and values: a bug of the caller, named."""
        seen: set[int] = set()
        for sequence in sequences:
            slots, start, count = sequence.block_table, sequence.num_computed_tokens, len(sequence.token_ids)
            if len(slots) != 1 or not 0 <= slots[0] < self.spec.num_blocks or slots[0] in seen:
                raise EngineFailure(
                    f"block_table must name one slot in [0, {self.spec.num_blocks - 1}] that no other sequence of the "
                    f"step has, got {list(slots)}"
                )
            seen.add(slots[0])
            if not 0 <= start <= self._rows.lengths[slots[0]]:
                raise EngineFailure(
                    f"num_computed_tokens must be in [0, {self._rows.lengths[slots[0]]}], what slot {slots[0]} holds, "
                    f"got {start}"
                )
            if count == 0 or start + count > self.spec.max_model_len:
                raise EngineFailure(
                    f"token_ids must be 1 to {self.spec.max_model_len - start} from position {start} on, got {count}"
                )
            if not 0 <= sequence.num_logits <= count:
                raise EngineFailure(f"num_logits must be in [0, {count}], got {sequence.num_logits}")

    def _gather(self, sequences: Sequence[SequenceStep]) -> None:
        """Bring the rows of `sequences` together."""
        for move in self._rows.gather(sequence.block_table[0] for sequence in sequences):
            if move.num_tokens:
                act = self.copy_rows if move.copies else self.swap_rows
                act(move.source, move.destination, move.num_tokens)

    def _boxes(self, sequences: Sequence[SequenceStep]) -> list[Box]:
        """The boxes of the step, in order. A share that is cut has its parts in rounds: one after the other."""
        rounds: list[list[Share]] = []
        place = 0
        for sequence in sequences:
            places = range(place, place + sequence.num_logits)
            place += sequence.num_logits
            row = self._rows.row(sequence.block_table[0])
            whole = Share(row, sequence.num_computed_tokens, sequence.token_ids, places)
            for index, share in enumerate(split(whole, self._limits)):
                if index == len(rounds):
                    rounds.append([])
                rounds[index].append(share)
        return [box for shares in rounds for box in boxes(shares, self._limits)]

    def _see(self, needed: int, computed: Sequence[int]) -> None:
        """See what this step needs of the cache and the rows hold, `computed` positions each; or less, if much less."""
        needed = max(needed, *computed)
        view = next(view for view in self._limits.views if view >= needed)
        if view > self._view or view * SHRINK_FACTOR <= self._view:
            self.set_view(view, computed)
            self._view = view

    def _run_all(self, calls: Sequence[LinearCall], num_logits: int) -> np.ndarray:
        """The logits of all calls, in the order of their places."""
        if len(calls) == 1 and num_logits:
            return self.run(calls[0])[:num_logits]
        logits = np.empty((num_logits, self.spec.vocab_size), np.float32)
        for call in calls:
            computed = self.run(call)
            logits[call.places] = computed[: len(call.places)]
        return logits

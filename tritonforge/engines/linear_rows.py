"""Which row of a linear KV cache holds which slot, how far each is filled, and the moves that put rows side by side.

A call covers neighbouring rows, and rows between those that take part are computed for nothing. So slots, which the
scheduler hands out, may live in any row: before a step its rows are brought together. Pure; linear.py calls it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """Exchange the first `num_tokens` positions of two rows, or with `copies` only copy them from source to
    destination, which holds nothing of worth."""

    source: int
    destination: int
    num_tokens: int
    copies: bool


class SlotRows:
    """A permutation of slots over rows, and how many positions of each slot's row may hold live keys and values."""

    def __init__(self, num_slots: int) -> None:
        self.lengths = [0] * num_slots
        self._row_of = list(range(num_slots))
        self._slot_at = list(range(num_slots))

    def row(self, slot: int) -> int:
        """The row that holds `slot`."""
        return self._row_of[slot]

    def length_at(self, row: int) -> int:
        """The positions of `row` that may be live: whatever must not change is before this one."""
        return self.lengths[self._slot_at[row]]

    def lengths_by_row(self) -> list[int]:
        """length_at for all rows."""
        return [self.lengths[slot] for slot in self._slot_at]

    def gather(self, slots: Iterable[int]) -> list[Move]:
        """Bring the rows of `slots` together with as few moves as there can be, and return these, to be done in order.

        Of all windows of as many rows, the one that holds most of them already stays; the others move into its holes.
        """
        rows = sorted(self._row_of[slot] for slot in slots)
        if not rows or rows[-1] - rows[0] + 1 == len(rows):
            return []
        first = self._window(rows)
        window = range(first, first + len(rows))
        taken = set(rows)
        outside = [row for row in rows if row not in window]
        holes = [row for row in window if row not in taken]
        return [self._exchange(row, hole) for row, hole in zip(outside, holes, strict=True)]

    def _window(self, rows: Sequence[int]) -> int:
        """The first row of the window of len(rows) rows that holds most of `rows`."""
        last = len(self._slot_at) - len(rows)
        return max(
            (min(row, last) for row in rows), key=lambda first: sum(first <= row < first + len(rows) for row in rows)
        )

    def _exchange(self, row: int, hole: int) -> Move:
        moved, displaced = self._slot_at[row], self._slot_at[hole]
        self._slot_at[row], self._slot_at[hole] = displaced, moved
        self._row_of[moved], self._row_of[displaced] = hole, row
        lengths = self.lengths[moved], self.lengths[displaced]
        if lengths[0] == 0:
            return Move(hole, row, lengths[1], copies=True)
        return Move(row, hole, max(lengths), copies=lengths[1] == 0)

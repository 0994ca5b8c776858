"""From the shares of a step to the calls of a step graph: rows that share a call, padding, dummy rows. Pure.

A call is a box: neighbouring rows of the cache, each with as many tokens. Short shares (decodes and drafts) are put
together where that wastes less than another call costs; a long one has a call of its own. linear.py calls it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tritonforge.engines.linear_rows import SlotRows


@dataclass(frozen=True)
class CallLimits:
    """What a call may be.

    A row has at most `max_tokens` tokens, a call of more than one token a row has at most `max_wide_rows` rows, and
    logits are wanted of at most `max_logit_rows` tokens. Shares of up to `narrow_tokens` tokens may be padded and share
    a call; longer ones are padded to the next of `widths`, if any. `call_cost` is what a call costs in tokens.
    `views` are the cache lengths that a call may see, ascending: the last one is that of the cache as allocated.
    """

    views: tuple[int, ...]
    max_tokens: int
    max_wide_rows: int
    max_logit_rows: int
    narrow_tokens: int = 16
    widths: tuple[int, ...] = ()
    call_cost: int = 16


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One run of a step graph over the rows first_row, first_row + 1, ... of the cache; arrays are int64.

    `input_ids` [batch, tokens] is padded on the right, `write_index` [batch] is the position of a row's first token.
    `logit_rows` [rows], at least one, are flat indices into batch * tokens. Their logits go to the rows `places` of the
    step's logits; with no places they are not wanted. `cache_len` is the length of the cache that the call sees.
    """

    first_row: int
    input_ids: np.ndarray
    write_index: np.ndarray
    logit_rows: np.ndarray
    places: range | np.ndarray
    cache_len: int


@dataclass(frozen=True, slots=True)
class Share:
    """What a step computes in one row: `token_ids` from position `start` on, logits of the last ones to `places`."""

    row: int
    start: int
    token_ids: Sequence[int]
    places: range

    @property
    def width(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Box:
    """The rows first to last of a call with `width` tokens each, and the shares among them."""

    first: int
    last: int
    width: int
    shares: tuple[Share, ...]


def split(share: Share, limits: CallLimits) -> Iterator[Share]:
    """Cut `share` into consecutive ones that each fit a call."""
    first_logit = share.width - len(share.places)
    begin = 0
    while begin < share.width:
        end = min(begin + limits.max_tokens, share.width)
        end = min(end, max(begin, first_logit) + limits.max_logit_rows)
        places = share.places[max(begin - first_logit, 0) : max(end - first_logit, 0)]
        yield Share(share.row, share.start + begin, share.token_ids[begin:end], places)
        begin = end


def boxes(shares: Sequence[Share], limits: CallLimits) -> list[Box]:
    """The calls of `shares`, no two of which are in one row: narrow ones first."""
    narrow = [share for share in shares if share.width <= limits.narrow_tokens]
    made = [box for group in group_by_width(narrow, limits.call_cost) for box in cover(group, limits)]
    for share in shares:
        if share.width > limits.narrow_tokens:
            made.append(Box(share.row, share.row, padded_width(share.width, limits.widths), (share,)))
    return made


def padded_width(width: int, widths: Sequence[int]) -> int:
    """The least of `widths` that holds `width` tokens, or `width` itself when none does."""
    return min((one for one in widths if one >= width), default=width)


def group_by_width(shares: Sequence[Share], call_cost: int) -> list[list[Share]]:
    """Groups of shares that are padded to the widest of each, at the least cost: tokens computed, and calls.

    With the widths in order, a group is a run of them. best[k] is the least cost of the first k widths, and begins[k]
    is where the last group of that starts.
    """
    widths = sorted({share.width for share in shares})
    by_width = {width: [share for share in shares if share.width == width] for width in widths}
    best, begins = [0], [0]
    for end in range(1, len(widths) + 1):
        costs, count = [], 0
        for begin in range(end - 1, -1, -1):
            count += len(by_width[widths[begin]])
            costs.append((best[begin] + call_cost + count * widths[end - 1], begin))
        cost, begin = min(costs)
        best.append(cost)
        begins.append(begin)
    groups, end = [], len(widths)
    while end:
        groups.append([share for width in widths[begins[end] : end] for share in by_width[width]])
        end = begins[end]
    return groups[::-1]


def cover(group: Sequence[Share], limits: CallLimits) -> Iterator[Box]:
    """Boxes over the rows of `group`: a gap is computed along with its neighbours when that costs less than a call."""
    shares = sorted(group, key=lambda share: share.row)
    width = max(share.width for share in shares)
    begin = 0
    for index, (share, following) in enumerate(pairwise([*shares, None]), 1):
        if following is not None:
            gap = following.row - share.row - 1
            too_many = width > 1 and following.row - shares[begin].row >= limits.max_wide_rows
            if not too_many and gap * width <= limits.call_cost:
                continue
        yield Box(shares[begin].row, share.row, width, tuple(shares[begin:index]))
        begin = index


def make_call(box: Box, rows: SlotRows, cache_len: int) -> LinearCall:
    """The call of `box`. A row that takes no part is a dummy: it writes behind all that may be live in it."""
    batch = box.last - box.first + 1
    input_ids = np.zeros((batch, box.width), np.int64)
    write_index = np.array([rows.length_at(row) for row in range(box.first, box.last + 1)], np.int64)
    wanted: list[tuple[int, int]] = []
    for share in box.shares:
        line = share.row - box.first
        input_ids[line, : share.width] = share.token_ids
        write_index[line] = share.start
        first_logit = line * box.width + share.width - len(share.places)
        wanted.extend((place, first_logit + offset) for offset, place in enumerate(share.places))
    wanted.sort()
    places = np.array([place for place, _ in wanted], np.int64)
    logit_rows = np.array([row for _, row in wanted] or [0], np.int64)
    return LinearCall(box.first, input_ids, write_index, logit_rows, places, cache_len)


def positions_seen(box: Box, rows: SlotRows) -> int:
    """How long the cache must be that the call of `box` sees."""
    starts = {share.row: share.start for share in box.shares}
    return max(starts.get(row, rows.length_at(row)) for row in range(box.first, box.last + 1)) + box.width

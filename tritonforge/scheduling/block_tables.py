"""BlockTables: what a request holds of the KV cache, from its cached prefix to its last block. Pure.

It moves blocks between the BlockManager, which knows no requests, and the requests' block tables; the Scheduler, its
only caller, decides who gets them. Between steps a table has exactly the blocks of the computed tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tritonforge.scheduling.blocks import BlockManager, hash_block, hash_blocks, hash_salt
from tritonforge.scheduling.request import Phase, Request
from tritonforge.scheduling.slots import SlotContents

WORTH_TAKING = 0.5
"""A free slot is taken over by a prompt that shares at least this part of its tokens. If it shares less, they are
copied, and the slot keeps the rest: every chat begins with the same words of its template."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a request need not compute: `num_tokens` tokens, in shared `blocks` and, if not None, a copy of `source`."""

    num_tokens: int
    blocks: Sequence[int]
    source: int | None = None
    forked: bool = False


class BlockTables:
    """The block tables of all running requests, over one BlockManager.

    In a linear cache a block is one sequence's slot, and `slots` knows their contents: the first tokens of any slot can
    be reused, in place or by a copy. In a paged cache it is None, and full blocks are shared by their hash.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._slots = SlotContents() if blocks.linear else None

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that `request` lacks to hold its first `num_tokens` tokens."""
        return self._blocks.blocks_for(num_tokens) - len(request.block_table)

    def grow(self, request: Request, num_tokens: int) -> None:
        """Let `request` hold its first `num_tokens` tokens; the blocks are known to be free."""
        missing = self.num_missing(request, num_tokens)
        if missing > 0:
            request.block_table.extend(self._allocate(missing))

    def _allocate(self, count: int) -> list[int]:
        """`count` blocks of which nothing is known any more."""
        blocks = self._blocks.allocate(count)
        if self._slots is not None:
            for slot in blocks:
                self._slots.forget(slot)
        return blocks

    def find_prefix(self, request: Request) -> Prefix:
        """What could be shared if `request` started now; nothing is taken yet.

        The last token is always computed: its logits are what the step is for.
        """
        if not request.reuse_prefix:
            return Prefix(0, ())
        last = len(request.prompt_ids) - 1
        parent = request.parent
        forkable = parent is not None and request.preemptions == 0 and parent.phase is Phase.RUNNING
        if forkable and parent.num_computed_tokens > last:
            return self._fork_prefix(parent, last)
        if self._slots is not None:
            return self._slot_prefix(request, self._slots)
        hashes = self._hashes(request)
        cached = self._blocks.cached_prefix(hashes[: (request.num_tokens - 1) // self._blocks.block_size])
        return Prefix(len(cached) * self._blocks.block_size, cached)

    def _fork_prefix(self, parent: Request, num_tokens: int) -> Prefix:
        """Copy-on-write: the child writes its last prompt token into a copy of the block that holds it.

        parent:  [ shared ] [ shared ] [ source | its own output ... ]
        child:   [ shared ] [ shared ] [ copy   | last prompt token, then its own output ]
        """
        shared, partial = divmod(num_tokens, self._blocks.block_size)
        source = parent.block_table[shared] if partial else None
        return Prefix(num_tokens, parent.block_table[:shared], source, forked=True)

    def _slot_prefix(self, request: Request, slots: SlotContents) -> Prefix:
        """The first tokens of a slot: of a free one in place, if that loses little, or a copy of any one's."""
        tokens = request.tokens(0, request.num_tokens - 1)
        num_free, free = slots.longest_prefix(self._blocks.free_blocks, request.cache_salt, tokens)
        num_tokens, source = slots.longest_prefix(range(self._blocks.num_blocks), request.cache_salt, tokens)
        if free is not None and num_free == num_tokens and num_free >= WORTH_TAKING * slots.length(free):
            return Prefix(num_free, (free,))
        return Prefix(num_tokens, (), source)

    def start(self, request: Request, prefix: Prefix) -> tuple[int, int] | None:
        """Give `request` its prefix, for which there is room; returns the (source, destination) to copy, if any."""
        self._blocks.take(prefix.blocks)
        request.block_table.extend(prefix.blocks)
        request.num_published_blocks = prefix.num_tokens // self._blocks.block_size
        request.num_computed_tokens = prefix.num_tokens
        if self._slots is not None and prefix.blocks:
            self._slots.cut(prefix.blocks[0], prefix.num_tokens)
        if prefix.source is None:
            return None
        [copy] = self._allocate(1)
        request.block_table.append(copy)
        return prefix.source, copy

    def settle(self, request: Request) -> None:
        """After a step: publish the blocks that are full of computed tokens, give back those that hold none."""
        if self._slots is not None:
            self._record(request, self._slots)
            return
        size = self._blocks.block_size
        num_full = request.num_computed_tokens // size
        if num_full > request.num_published_blocks:
            self._publish(request, num_full)
        surplus = self._blocks.blocks_for(request.num_computed_tokens)
        if surplus < len(request.block_table):
            self._blocks.release(request.block_table, keep=surplus)

    def _record(self, request: Request, slots: SlotContents) -> None:
        """Note what the slot of `request` holds by now. Its only slot is never given back before its end."""
        [slot] = request.block_table
        known = slots.length(slot)
        tokens = request.tokens(known, request.num_computed_tokens)
        if known:
            slots.append(slot, tokens)
        else:
            slots.begin(slot, request.cache_salt, tokens)

    def _publish(self, request: Request, num_full: int) -> None:
        size = self._blocks.block_size
        hashes = self._hashes(request)
        for index in range(request.num_published_blocks, num_full):
            if index == len(hashes):
                parent = hashes[-1] if hashes else hash_salt(request.cache_salt)
                hashes.append(hash_block(parent, request.tokens(index * size, (index + 1) * size)))
            self._blocks.publish(request.block_table[index], hashes[index])
        request.num_published_blocks = num_full

    def _hashes(self, request: Request) -> list[bytes]:
        """The content hashes of the request's full blocks that are known: at least the prompt's."""
        if not request.block_hashes:
            root = hash_salt(request.cache_salt)
            request.block_hashes = hash_blocks(request.prompt_ids, self._blocks.block_size, root)
        return request.block_hashes

    def release(self, request: Request) -> None:
        """Drop all blocks of `request`; what it has computed of its tokens counts no more."""
        self._blocks.release(request.block_table)
        request.num_computed_tokens = request.num_published_blocks = 0

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Assert that what is known of the slots of running `requests` is what they computed, or the start of it."""
        for request in requests if self._slots is not None else ():
            if not request.block_table:
                continue
            [slot] = request.block_table
            known = self._slots.length(slot)
            assert known <= request.num_computed_tokens, "a slot is said to hold what was not computed"
            tokens = request.tokens(0, known)
            assert self._slots.longest_prefix([slot], request.cache_salt, tokens) == (known, slot if known else None)

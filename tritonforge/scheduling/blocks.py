"""BlockManager: ref-counted KV blocks with a prefix cache. Pure bookkeeping: it sees ids and hashes, never tensors.

A block is free, or referenced by one or more block tables. A free block keeps its content hash until it is handed out
again, so a finished prompt stays reusable for as long as there is room; the longest-free block is evicted first.

    free:  [oldest ........................ newest]     -> allocate takes from the left
    cached: hash -> block id, for referenced and for free blocks alike
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

BlockHash = bytes


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Content hash of a full block, given its parent block's hash (empty for the first): it covers all tokens so far.

    Cryptographic, so that nobody can craft a prompt that collides with, and reads, another's cached block.
    """
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


def hash_salt(salt: str) -> BlockHash:
    """The parent of the first block: only prompts with the same salt share blocks. Empty without a salt."""
    return blake2b(salt.encode(), digest_size=16, person=b"salt").digest() if salt else b""


def hash_blocks(token_ids: Sequence[int], block_size: int, root: BlockHash = b"") -> list[BlockHash]:
    """Content hashes of the full blocks of `token_ids`, in order, below `root`."""
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


class BlockManager:
    """Hands out the block ids 0 to num_blocks - 1 of an engine's KV cache.

    With `linear` a block is a slot that holds a whole sequence, see tables.py; only its context's first tokens are
    reused, so no slot is published by a hash.
    """

    def __init__(self, num_blocks: int, block_size: int, *, linear: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.linear = linear
        self._ref_count = [0] * num_blocks
        self._free: dict[int, None] = dict.fromkeys(range(num_blocks))  # ordered: the first is the oldest
        self._block_of_hash: dict[BlockHash, int] = {}
        self._hash_of_block: dict[int, BlockHash] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, cached or not."""
        return len(self._free)

    @property
    def free_blocks(self) -> Iterable[int]:
        """The blocks that no request holds, the one that was free for longest first."""
        return self._free.keys()

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, in [0, 1]."""
        return 1.0 - len(self._free) / self.num_blocks

    @property
    def most_per_request(self) -> int:
        """Blocks that one request can hold: all of them, or in a linear cache its slot."""
        return 1 if self.linear else self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def cached_prefix(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Block ids of the longest cached prefix; nothing is taken yet."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_take(self, cached: Sequence[int], num_new: int) -> bool:
        """Whether `cached` blocks can be taken and `num_new` more allocated at the same time."""
        return num_new + sum(1 for block in cached if self._ref_count[block] == 0) <= self.num_free

    def take(self, cached: Sequence[int]) -> None:
        """Add a reference to each of the `cached` blocks."""
        for block in cached:
            if self._ref_count[block] == 0:
                del self._free[block]
            self._ref_count[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with a reference each; the caller has checked that they are free. Evicts their content."""
        assert count <= self.num_free, "allocate was called without room"
        blocks = []
        for _ in range(count):
            block = next(iter(self._free))
            del self._free[block]
            self._forget(block)
            self._ref_count[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Make a full, computed block findable; if its content is cached already, the first one stays."""
        if block_hash not in self._block_of_hash:
            self._forget(block)
            self._block_of_hash[block_hash] = block
            self._hash_of_block[block] = block_hash

    def num_unshared(self, block_table: Iterable[int]) -> int:
        """How many blocks would become free if `block_table` were released."""
        return sum(1 for block in block_table if self._ref_count[block] == 1)

    def release(self, block_table: list[int], keep: int = 0) -> None:
        """Drop one reference to each block but the first `keep`, and cut the table.

        Released from the end, so that the start of a prompt outlives its tail in the prefix cache.
        """
        for block in reversed(block_table[keep:]):
            self._ref_count[block] -= 1
            assert self._ref_count[block] >= 0, f"block {block} was freed twice"
            if self._ref_count[block] == 0:
                self._free[block] = None
        del block_table[keep:]

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of_block.pop(block, None)
        if block_hash is not None:
            del self._block_of_hash[block_hash]

    def check_invariants(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert that references are exactly those of `block_tables`, and that free and held blocks partition."""
        held = Counter(block for table in block_tables for block in table)
        assert all(self._ref_count[block] == held.get(block, 0) for block in range(self.num_blocks)), "leaked block"
        assert set(self._free).isdisjoint(held) and len(self._free) + len(held) == self.num_blocks
        assert {block: h for h, block in self._block_of_hash.items()} == self._hash_of_block

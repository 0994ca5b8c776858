"""Remembers which replica has seen which prompt's beginning, so that a request goes where that is cached. Pure."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 32
"""Prefixes are compared at this step, the size of the decoder's KV blocks."""
MAX_ENTRIES = 50_000


class PrefixIndex:
    """The newest prefixes, each with the replica that was last asked for it."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._seen: OrderedDict[bytes, str] = OrderedDict()

    def keys_of(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """A key for the first block, the first two, and so on; a salt keeps tenants apart, as the prefix cache does."""
        digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16)
        keys = []
        for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            digest.update(repr(tuple(token_ids[start : start + BLOCK_TOKENS])).encode())
            keys.append(digest.digest())
        return keys

    def find(self, keys: Sequence[bytes]) -> str | None:
        """The replica that has seen the longest of these prefixes."""
        for key in reversed(keys):
            if key in self._seen:
                return self._seen[key]
        return None

    def learn(self, keys: Sequence[bytes], replica: str) -> None:
        """`replica` computes these prefixes now."""
        for key in keys:
            self._seen[key] = replica
            self._seen.move_to_end(key)
        while len(self._seen) > self._max_entries:
            self._seen.popitem(last=False)

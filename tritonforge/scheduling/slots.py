"""SlotContents: which computed tokens each slot of a linear KV cache holds, for prompts that begin with the same ones.

A slot is a block as long as the context, so what is reused is not a whole block but the first tokens of one, whether
its request still runs or has finished. Pure; BlockTables, the only caller, keeps it true.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TOKEN_BYTES = array("q").itemsize


@dataclass(slots=True)
class Content:
    """Tokens of a slot from position 0 on, as the bytes of an int64 array: they compare at the speed of memory."""

    salt: str
    tokens: bytearray

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class SlotContents:
    """What slots hold: an entry never says more than what was computed, and nothing overwrites what it says."""

    def __init__(self) -> None:
        self._contents: dict[int, Content] = {}

    def __len__(self) -> int:
        return len(self._contents)

    def length(self, slot: int) -> int:
        """How many tokens `slot` is known to hold."""
        content = self._contents.get(slot)
        return 0 if content is None else len(content)

    def begin(self, slot: int, salt: str, token_ids: Sequence[int]) -> None:
        """`slot` holds `token_ids` and nothing else that counts."""
        self._contents[slot] = Content(salt, bytearray(array("q", token_ids).tobytes()))

    def append(self, slot: int, token_ids: Sequence[int]) -> None:
        """`slot` holds `token_ids` behind the others."""
        self._contents[slot].tokens += array("q", token_ids).tobytes()

    def cut(self, slot: int, num_tokens: int) -> None:
        """What `slot` holds from position `num_tokens` on will be overwritten."""
        del self._contents[slot].tokens[num_tokens * TOKEN_BYTES :]

    def forget(self, slot: int) -> None:
        """`slot` was handed out for something else."""
        self._contents.pop(slot, None)

    def longest_prefix(self, slots: Iterable[int], salt: str, token_ids: Sequence[int]) -> tuple[int, int | None]:
        """How many first tokens of `token_ids` a slot holds, and the first of `slots` that holds most; (0, None)."""
        wanted = array("q", token_ids).tobytes()
        best, found = 0, None
        for slot in slots:
            content = self._contents.get(slot)
            if content is None or content.salt != salt or len(content) <= best:
                continue
            if content.tokens.startswith(wanted[: (best + 1) * TOKEN_BYTES]) and len(wanted) > best * TOKEN_BYTES:
                best, found = common_tokens(content.tokens, wanted), slot
        return best, found


def common_tokens(first: bytes | bytearray, second: bytes | bytearray) -> int:
    """How many tokens are equal before the first that differs: by bisection, each question one comparison of memory."""
    low, high = 0, min(len(first), len(second)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if first[low * TOKEN_BYTES : middle * TOKEN_BYTES] == second[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low

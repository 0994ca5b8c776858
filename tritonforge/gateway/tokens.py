"""Texts of tokens at the edge, from the release's tokenizer file: for log-probabilities and /detokenize."""

from collections.abc import Sequence
from pathlib import Path

from llguidance import LLTokenizer

from tritonforge.structured.tool_calls import detect_format
from tritonforge.text import Tokenizer


class ReleaseTokens:
    """The vocabulary of a release, read once."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the version folder of the model `tokenizer` in a release."""
        self._tokenizer = Tokenizer(folder)
        self._vocabulary = LLTokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"))
        self._bytes: dict[int, bytes] = {}

    @property
    def size(self) -> int:
        """How many token ids there are."""
        return self._vocabulary.vocab_size

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template writes tools, in a format whose calls `decoder` can read."""
        return detect_format(self._tokenizer.tool_template) is not None

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token's text; a special token's are its name."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._vocabulary.decode_bytes([token_id]) if token_id < self.size else b""
        return known

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, without special tokens."""
        return self._tokenizer.decode(token_ids)

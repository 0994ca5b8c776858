"""Text in and out: the tokenizer, incremental detokenization and stop strings.

The tokenizer model encodes with it, the engine loop turns new token ids into text deltas with it. It knows nothing of
scheduling or Triton. Detokenization is a pure function of the last ids, so no state can leak between requests.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from tritonforge.chat import ChatTemplate
from tritonforge.errors import InvalidRequest, NotFound

WINDOW = 16
"""Token ids of context that a delta is computed with; from 6 on, no difference to decoding the whole text was seen."""

Decode = Callable[[Sequence[int]], str]


class Tokenizer:
    """A Hugging Face fast tokenizer with its chat template, read from the folder of a release."""

    def __init__(self, folder: Path) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise NotFound(f"tokenizer file {path} does not exist")
        self._tokenizer = FastTokenizer.from_file(str(path))
        self._template = ChatTemplate.read(path.parent)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that this tokenizer puts around a plain prompt, if any."""
        return self._tokenizer.encode(text).ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` alone, as it would be inside a longer text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @property
    def tool_template(self) -> str:
        """The source of the chat template that requests with tools are rendered with; empty without one."""
        return "" if self._template is None else self._template.tool_source

    def encode_end(self, text: str, room: int) -> list[int]:
        """At most `room` ids: the last ones of `text`, within the special tokens of encode(); no character is split.

        Raises InvalidRequest when the special tokens leave no room for a token of the text.
        """
        encoding = self._tokenizer.encode(text)
        added = encoding.special_tokens_mask  # 1: put there by the tokenizer, 0: from the text, special or not
        first = added.index(0) if 0 in added else len(added)
        last = len(added) - added[::-1].index(0) if 0 in added else len(added)
        start = max(first, last - max(0, room - first - (len(added) - last)))
        while first < start < last and encoding.offsets[start][0] < encoding.offsets[start - 1][1]:
            start += 1  # this token goes on with a character that the token before it began
        if start >= last:
            raise InvalidRequest(
                f"the prompt must have room for a token of text: max_tokens leaves {max(0, room)} tokens"
            )
        return encoding.ids[:first] + encoding.ids[start:]

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a chat, with the start of the assistant's next message unless add_generation_prompt is False.

        The template writes all special tokens itself. Raises InvalidRequest when it cannot write the messages or tools.
        """
        if self._template is None:
            raise InvalidRequest("chat is not available: this model has no chat template")
        text = self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens; bytes that are no UTF-8 (yet) become U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def text_delta(decode: Decode, window: Sequence[int], new: Sequence[int], *, final: bool) -> str:
    """Text that `new` adds after `window`; an unfinished UTF-8 tail waits for its last token, unless `final`."""
    before = decode(window).rstrip("\ufffd") if window else ""
    after = decode([*window, *new])
    if not final:
        after = after.rstrip("\ufffd")
    return after[len(before) :]


def find_stop(text: str, stops: Iterable[str], *, include: bool = False) -> int | None:
    """Where `text` ends: before (`include`: after) the stop string that starts first in it; None without one."""
    found = [(index, len(stop)) for index, stop in ((text.find(stop), stop) for stop in stops) if index >= 0]
    if not found:
        return None
    start, length = min(found)
    return start + length * include


def held_back(text: str, stops: Iterable[str]) -> int:
    """Length of the longest end of `text` that could still become a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


@dataclass
class TextStream:
    """The text of one answer as its tokens arrive. `push` returns what may be shown; what follows a stop never is.

    The stop string itself is shown when `include_stop`.
    """

    decode: Decode
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    stopped: bool = False
    _window: list[int] = field(default_factory=list)
    _held: str = ""

    def push(self, token_id: int | None, *, final: bool, may_stop: bool = True) -> str:
        """Text that is safe to show after `token_id` (None: the answer ends without another token).

        Sets `stopped` when a stop string is complete: the text up to it is returned and the rest is dropped. A stop
        string that ends in a token that was pushed without `may_stop` is none.
        """
        new = [] if token_id is None else [token_id]
        delta = text_delta(self.decode, self._window, new, final=final)
        self._window.extend(new)
        if delta:  # ids without text yet stay, however many: their text is still to come
            del self._window[:-WINDOW]
        stops = self.stops if may_stop else ()
        text = self._held + delta
        end = find_stop(text, stops, include=self.include_stop) if stops else None
        if end is not None:
            self.stopped = True
            return text[:end]
        keep = 0 if final or not stops else held_back(text, stops)
        shown, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return shown

"""Looks at one text with all patterns and classifiers of a stage; prompts.py and filters.py do so with every text."""

from collections.abc import Sequence

from tritonforge.gateway.api.errors import internal
from tritonforge.gateway.edge import Note
from tritonforge.gateway.filtering.config import Filter
from tritonforge.gateway.filtering.scanner import Piece, Scanner


class Blocked(Exception):
    """A blocking filter has matched; `before` is the text that came before it."""

    def __init__(self, before: str) -> None:
        super().__init__()
        self.before = before


class Redactor:
    """The patterns of all filters of one text: notes what matches, replaces it, or raises Blocked."""

    def __init__(self, filters: Sequence[Filter], stage: str, note: Note) -> None:
        self._owners = [one for one in filters for _ in one.compiled]
        self._scanner = Scanner([pattern for one in filters for pattern in one.compiled])
        self._stage, self._note = stage, note
        self.touched = False

    def push(self, text: str, *, final: bool) -> str:
        """What may be told now."""
        told = ""
        try:
            for piece in self._scanner.push(text, final=final):
                told += self._told(piece, told)
        except TimeoutError:
            raise internal() from None
        return told

    def _told(self, piece: Piece, before: str) -> str:
        if piece.pattern is None:
            return piece.text
        owner = self._owners[piece.pattern]
        self._note(owner.note(self._stage))
        if owner.action == "block":
            raise Blocked(before)
        if owner.action == "redact":
            self.touched = True
            return owner.replacement
        return piece.text


async def judge_whole(filters: Sequence[Filter], where: str, text: str, note: Note) -> None:
    """Raise Blocked for a prompt, or the arguments of a tool call, that a classifier does not let pass.

    One that would redact it blocks it too: it cannot say what to replace.
    """
    for one in filters:
        if one.judge is not None and await one.judge.score(text) >= one.threshold:
            note(one.note(where))
            if one.action != "record":
                raise Blocked("")

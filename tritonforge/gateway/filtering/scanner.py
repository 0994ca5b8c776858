"""Finds patterns in a text that comes in pieces, exactly as they would be found in the whole text. Pure.

Text is passed on as soon as no pattern can begin in it any more. The library `regex` tells where a match might still
begin: a search for the pattern with nothing allowed after it can only end as a partial match, at the end of the text.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from tritonforge.errors import InvalidRequest

MAX_MATCH = 4096
"""Characters that a pattern may match: what may have to be held back of an answer."""
CONTEXT = 256
"""Characters before the undecided ones that a pattern can look back at."""
SEARCH_S = 1.0
"""A search that takes longer ends the request: a pattern must not stop the gateway."""


@dataclass(frozen=True)
class Pattern:
    """One regular expression, in the syntax of Python's re; `accepts` looks at what it matched."""

    text: str
    accepts: Callable[[str], bool] = lambda found: True
    _whole: Any = field(init=False, repr=False, compare=False)
    _partial: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            most = re._parser.parse(self.text).getwidth()[1]  # type: ignore[attr-defined]
            whole, partial = regex.compile(self.text), regex.compile(f"(?:{self.text})(?!)")
        except (re.error, regex.error, RecursionError) as error:
            raise InvalidRequest(f"a pattern must be a regular expression, got {self.text!r}: {error}") from None
        if most > MAX_MATCH:
            rule = f"a pattern must match at most {MAX_MATCH} characters: write {{1,100}} in place of + or *"
            raise InvalidRequest(f"{rule}; got {self.text!r}")
        object.__setattr__(self, "_whole", whole)
        object.__setattr__(self, "_partial", partial)

    def find(self, text: str, start: int) -> tuple[int, int] | None:
        """The first match from `start` on that is accepted and not empty."""
        while (found := self._whole.search(text, start, timeout=SEARCH_S)) is not None:
            if found.end() > found.start() and self.accepts(found.group()):
                return found.span()
            start = found.start() + 1
            if start > len(text):
                break
        return None

    def undecided(self, text: str, start: int) -> int:
        """Where the first match might begin that more text could make, or make longer."""
        found = self._partial.search(text, start, partial=True, timeout=SEARCH_S)
        return len(text) if found is None else found.start()


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the text; `pattern` is the index of the one that matched it, None for text between matches."""

    text: str
    pattern: int | None = None


class _Known:
    """What one pattern finds next in a text that stays as it is: looked for again only behind it.

    Without it, a text full of matches of one pattern would be searched for the others from each of them to its end.
    """

    def __init__(self) -> None:
        self._found: tuple[int, int] | None = (-1, -1)
        self._undecided = -1

    def find(self, pattern: Pattern, text: str, at: int) -> tuple[int, int] | None:
        """See Pattern.find."""
        if self._found is not None and self._found[0] < at:
            self._found = pattern.find(text, at)
        return self._found

    def undecided(self, pattern: Pattern, text: str, at: int) -> int:
        """See Pattern.undecided."""
        if self._undecided < at:
            self._undecided = pattern.undecided(text, at)
        return self._undecided


class Scanner:
    """One text. The leftmost match counts, of several the one of the first pattern."""

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._patterns = patterns
        self._text = ""
        self._at = 0

    def push(self, text: str, *, final: bool) -> Iterator[Piece]:
        """What is decided now that `text` has come; with `final` all of it."""
        self._text += text
        known = [_Known() for _ in self._patterns]
        while True:
            found, hold = self._look(known, final=final)
            if found is None or found[0] >= hold:
                break
            start, end, pattern = found
            if start > self._at:
                yield Piece(self._text[self._at : start])
            self._at = end
            yield Piece(self._text[start:end], pattern)
        if hold > self._at:
            yield Piece(self._text[self._at : hold])
        cut = max(0, hold - CONTEXT)
        self._text, self._at = self._text[cut:], hold - cut

    def _look(self, known: Sequence["_Known"], *, final: bool) -> tuple[tuple[int, int, int] | None, int]:
        """The first match (start, end, pattern), and where a match might begin that is not decided yet."""
        best, length = None, len(self._text)
        hold = length
        for index, (pattern, seen) in enumerate(zip(self._patterns, known, strict=True)):
            found = seen.find(pattern, self._text, self._at)
            if not final:
                hold = min(hold, seen.undecided(pattern, self._text, self._at))
                if found is not None and found[1] == length:  # its end may still depend on what follows
                    hold, found = min(hold, found[0]), None
            if found is not None and (best is None or found[0] < best[0]):
                best = (*found, index)
        return best, hold

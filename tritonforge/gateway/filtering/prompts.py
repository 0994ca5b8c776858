"""The filter stage of prompts: every text of a request alone, those of a chat as one, and what is made of them.

A prompt may be megabytes long: it is looked at in stretches, between which others are answered, and for a bounded time.
"""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tritonforge.gateway.api.errors import internal, invalid
from tritonforge.gateway.edge import Note
from tritonforge.gateway.filtering.config import Filter
from tritonforge.gateway.filtering.prompt_texts import BETWEEN, rewritten, said_in, texts_of, told_beside
from tritonforge.gateway.filtering.redactor import Blocked, Redactor, judge_whole
from tritonforge.gateway.filtering.scanner import Scanner
from tritonforge.gateway.work import Work

STRETCH = 16_384
"""Characters that are looked at at once."""
MOST_S = 5.0
"""Seconds of looking that one request gets; ordinary text of 4 MiB takes a fraction of one."""


async def looked_at(work: Work, filters: Sequence[Filter], note: Note) -> Work:
    """The work as the model may see it. Raises Blocked, and ApiError for a prompt that takes too long."""
    time_left = _Time()
    said = said_in(work)
    whole = [BETWEEN.join(said)] if len(said) > 1 else []
    for text in (*texts_of(work), *whole):  # what is split over the messages of a chat is read together
        await time_left.redact([one for one in filters if one.action != "redact"], text, note)
        await judge_whole(filters, "prompt", text, note)
    redacting = [one for one in filters if one.action == "redact" and one.compiled]
    if not redacting:
        return work
    for one in redacting:
        if await _goes_across(one, said, time_left) or await _is_in(one, told_beside(work), time_left):
            note(one.note("prompt"))
            raise Blocked("")  # it cannot say what to replace
    texts: dict[str, str] = {}
    rewritten(work, lambda text: texts.setdefault(text, text))
    for text in texts:
        texts[text] = await time_left.redact(redacting, text, note)
    return rewritten(work, texts.__getitem__)


@dataclass
class _Time:
    """The time that one request has left for all that is looked for in it."""

    left_s: float = field(default=MOST_S)

    async def over(self, text: str, push: Callable[[str, bool], None]) -> None:
        """Give `text` to push(stretch, final) in stretches, and let others run between them."""
        for start in range(0, max(1, len(text)), STRETCH):
            began = time.perf_counter()
            push(text[start : start + STRETCH], start + STRETCH >= len(text))
            self.left_s -= time.perf_counter() - began
            if self.left_s < 0:
                raise invalid(None, "The request has too much in it that filters must look at.", "content_filter")
            if len(text) > STRETCH:
                await asyncio.sleep(0)

    async def redact(self, filters: Sequence[Filter], text: str, note: Note) -> str:
        """See Redactor: of a whole text."""
        redactor, told = Redactor(filters, "prompt", note), []
        await self.over(text, lambda piece, final: told.append(redactor.push(piece, final=final)))
        return "".join(told)

    async def spans(self, one: Filter, text: str) -> list[tuple[int, int]]:
        """Where the patterns of a filter match."""
        scanner, at, found = Scanner(one.compiled), 0, []

        def push(stretch: str, final: bool) -> None:
            nonlocal at
            for piece in scanner.push(stretch, final=final):
                if piece.pattern is not None:
                    found.append((at, at + len(piece.text)))
                at += len(piece.text)

        try:
            await self.over(text, push)
        except TimeoutError:
            raise internal() from None
        return found


async def _goes_across(one: Filter, texts: Sequence[str], time_left: _Time) -> bool:
    """Whether it matches a stretch of several texts of a chat."""
    if len(texts) < 2:
        return False
    ends: list[int] = []
    for text in texts[:-1]:
        ends.append(len(text) + (ends[-1] + len(BETWEEN) if ends else 0))
    for start, end in await time_left.spans(one, BETWEEN.join(texts)):
        place = bisect_right(ends, start)
        if place < len(ends) and end > ends[place] + len(BETWEEN):
            return True
    return False


async def _is_in(one: Filter, texts: Iterable[str], time_left: _Time) -> bool:
    for text in texts:
        if await time_left.spans(one, text):
            return True
    return False

"""Output formatting: changes the texts of answers on their way, by what an alias asks for in `formats`.

Formats run before the filters, so that these see what the client will.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from tritonforge.gateway.answers import Gain
from tritonforge.gateway.config import Tenant
from tritonforge.gateway.edge import AnswerFilter, Note
from tritonforge.gateway.filtering.config import load
from tritonforge.gateway.routing.config import Alias
from tritonforge.gateway.work import Work


class Formatter(Protocol):
    """One answer's text on its way. One is made for each answer."""

    def push(self, text: str, *, final: bool) -> str:
        """What is told of `text` now; with `final` also what was held back."""


class Strip:
    """`strip`: no white space at either end of the answer."""

    def __init__(self) -> None:
        self._held, self._begun = "", False

    def push(self, text: str, *, final: bool) -> str:
        """See Formatter: white space waits for what follows it."""
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
        self._begun = self._begun or bool(text)
        kept = text.rstrip()
        self._held = "" if final else text[len(kept) :]
        return kept


class Newlines:
    """`newlines`: every end of a line is one line feed, and no more than one empty line follows another line."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str, *, final: bool) -> str:
        """See Formatter: line ends wait for what follows them."""
        text = self._held + text
        kept = text if final else text.rstrip("\r\n")
        self._held = text[len(kept) :]
        return re.sub(r"\n{3,}", "\n\n", kept.replace("\r\n", "\n").replace("\r", "\n"))


BUILTIN: Mapping[str, Callable[[], Formatter]] = {"strip": Strip, "newlines": Newlines}


class FormatHook:
    """See edge.Hook. `formats` of an alias are `strip`, `newlines` or `module:factory`, a factory of Formatters."""

    def __init__(self, aliases: Mapping[str, Alias]) -> None:
        """Raises InvalidRequest for a format that there is not."""
        self._makers = {
            name: [BUILTIN.get(one) or load(f"formats of [aliases.{name}]", one) for one in alias.formats]
            for name, alias in aliases.items()
            if alias.formats
        }

    async def on_work(self, work: Work, tenant: Tenant, note: Note) -> Work:
        """See edge.Hook."""
        return work

    def filter_for(self, work: Work, tenant: Tenant, note: Note) -> AnswerFilter | None:
        """See edge.Hook."""
        makers = self._makers.get(work.model)
        return Formatted(makers) if makers else None


class Formatted:
    """See edge.AnswerFilter."""

    def __init__(self, makers: Sequence[Callable[[], Formatter]]) -> None:
        self._makers = makers
        self._formatters: dict[int, list[Formatter]] = {}

    async def push(self, gain: Gain) -> Gain:
        """See edge.AnswerFilter."""
        formatters = self._formatters.setdefault(gain.index, [make() for make in self._makers])
        text = gain.text
        for one in formatters:
            text = one.push(text, final=gain.finish_reason is not None)
        return replace(gain, text=text)

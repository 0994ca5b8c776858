"""The filter stage: looks at prompts before the model does, and at answers before the client does.

An edge has one FilterHook. Nothing that a blocking or redacting filter matches leaves in any piece of a stream, nor in
a tool's arguments, nor as log-probabilities of its tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from tritonforge.gateway.answers import Gain, Scored
from tritonforge.gateway.api.errors import ApiError, invalid
from tritonforge.gateway.config import Tenant
from tritonforge.gateway.edge import AnswerFilter, Note
from tritonforge.gateway.filtering.config import Filter
from tritonforge.gateway.filtering.prompts import looked_at
from tritonforge.gateway.filtering.redactor import Blocked, Redactor, judge_whole
from tritonforge.gateway.work import Work

CONTENT_FILTER = "content_filter"
READ_AT_ONCE = 200
"""Characters that filters which only record read at once."""
_SENTENCE = re.compile(r"[.!?。！？\n]\s*$")


class Judged:
    """One classifier at one answer: holds its text back by sentences until they were judged."""

    def __init__(self, owner: Filter, note: Note) -> None:
        self._owner, self._note = owner, note
        self._held = self._before = ""
        self.touched = False

    async def push(self, text: str, *, final: bool) -> str:
        """What may be told now. Raises Blocked."""
        self._held += text
        window = self._owner.window
        if not self._held or not (final or len(self._held) >= window or _SENTENCE.search(self._held)):
            return ""
        judge, held = self._owner.judge, self._held
        assert judge is not None
        self._held = ""
        if await judge.score(self._before + held) >= self._owner.threshold:
            self._note(self._owner.note("answer"))
            if self._owner.action == "block":
                raise Blocked("")
            if self._owner.action == "redact":  # what follows is judged beside what the client sees
                self.touched = True
                held = self._owner.replacement
        self._before = (self._before + held)[-window:]
        return held


class Answer:
    """One answer's way through all filters."""

    def __init__(self, filters: Sequence[Filter], note: Note) -> None:
        holding = [one for one in filters if one.action != "record"]
        self._filters, self._note = filters, note
        self._holds = bool(holding)
        self._recorder = Redactor([one for one in filters if one.action == "record"], "answer", note)
        self._redactor = Redactor([one for one in filters if one.compiled and one.action != "record"], "answer", note)
        self._judged = [Judged(one, note) for one in filters if one.judge is not None]
        self._scored: tuple[Scored, ...] = ()
        self._prompt: tuple[Scored, ...] = ()
        self._unread = ""

    async def push(self, gain: Gain) -> Gain:
        """See edge.AnswerFilter."""
        final = gain.finish_reason is not None
        self._unread += gain.text
        if final or len(self._unread) >= READ_AT_ONCE:  # it holds nothing back, so it need not look at every token
            self._recorder.push(self._unread, final=final)
            self._unread = ""
        told, ended = "", False
        try:
            told = self._redactor.push(gain.text, final=final)
            calls = tuple([replace(call, arguments=await self._whole(call.arguments)) for call in gain.calls])
        except Blocked as blocked:
            told, ended, calls = blocked.before, True, ()
        for one in self._judged:
            try:
                told = await one.push(told, final=final or ended)
            except Blocked:
                told, ended, calls = "", True, ()
        if ended:
            return Gain(gain.index, told, gain.token_ids, finish_reason=CONTENT_FILTER)
        scored, prompt = self._release(gain, final=final)
        return replace(gain, text=told, scored=scored, prompt=prompt, calls=calls)

    async def _whole(self, text: str) -> str:
        """A tool call's arguments, which come at once. Raises Blocked."""
        told = Redactor([one for one in self._filters if one.compiled], "answer", self._note).push(text, final=True)
        await judge_whole(self._filters, "answer", told, self._note)
        return told

    def _release(self, gain: Gain, *, final: bool) -> tuple[tuple[Scored, ...], tuple[Scored, ...]]:
        """Log-probabilities name tokens before their text is decided: they wait for the end, if anything is held.

        Those of an echoed prompt too, whose text is a part of the answer.
        """
        if not (self._holds or self._judged):
            return gain.scored, gain.prompt
        self._scored += gain.scored
        self._prompt += gain.prompt
        untouched = not self._redactor.touched and not any(one.touched for one in self._judged)
        return (self._scored, self._prompt) if final and untouched else ((), ())


class Answers:
    """See edge.AnswerFilter: all answers of one request."""

    def __init__(self, filters: Sequence[Filter], note: Note) -> None:
        self._filters, self._note = filters, note
        self._answers: dict[int, Answer] = {}

    async def push(self, gain: Gain) -> Gain:
        """See edge.AnswerFilter."""
        if gain.index not in self._answers:
            self._answers[gain.index] = Answer(self._filters, self._note)
        return await self._answers[gain.index].push(gain)


class FilterHook:
    """See edge.Hook."""

    def __init__(self, filters: Sequence[Filter]) -> None:
        self._filters = filters

    async def on_work(self, work: Work, tenant: Tenant, note: Note) -> Work:
        """See edge.Hook. Raises ApiError for a prompt that is blocked, or that cannot be looked at."""
        filters = [one for one in self._filters if one.applies("prompt", tenant.name, work.model)]
        if not filters:
            return work
        if any(source.token_ids is not None for source in work.prompts) and any(
            one.action != "record" for one in filters
        ):
            raise invalid("prompt", "prompt must be text here: token ids cannot be filtered")
        try:
            return await looked_at(work, filters, note)
        except Blocked:
            field = "messages" if work.prompts[0].text == "" else "prompt"
            raise ApiError(400, "The prompt was refused by the content filter.", CONTENT_FILTER, field) from None

    def filter_for(self, work: Work, tenant: Tenant, note: Note) -> AnswerFilter | None:
        """See edge.Hook."""
        filters = [one for one in self._filters if one.applies("answer", tenant.name, work.model)]
        return Answers(filters, note) if filters else None

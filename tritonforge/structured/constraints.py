"""Structured output: what a JSON schema, a regex, a grammar or a list of choices allows the next token to be.

The decoder keeps one `Grammars`. A request's grammar is compiled by the thread that takes the request in; each answer
walks it with a `GrammarState`, whose masks one worker thread computes while the engine computes the step. The library
underneath is llguidance (derivatives of regexes, an Earley parser, a trie of the vocabulary; no torch).
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from tritonforge.errors import EngineFailure, InvalidRequest
from tritonforge.structured.grammar_source import grammar_source
from tritonforge.structured.vocabulary import Vocabulary, allowed_ids

MAX_COMPILED = 64
"""Grammars kept ready, least recently used ones go first."""
MAX_ANSWERS = 256
"""Answers that share one compiled grammar: the automaton they share grows with what they write."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Of 168 grammars tried with these, many of them hostile, the slowest took 0.35 s to compile, and 0.11 s for one mask.

They bound work, not time; a mask of the 20 test schemas takes 0.1 ms.
"""


@dataclass(frozen=True)
class Next:
    """What may come next: the mask, and whether nothing but an end token may."""

    mask: np.ndarray
    finished: bool


class GrammarState:
    """How far one answer has come in its grammar. Used by one thread at a time; the masks come from the worker."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: LLMatcher,
        first: Next,
        worker: ThreadPoolExecutor,
        fail: Callable[[], None],
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._worker = worker
        self._fail = fail
        self._now = first
        self._next: Future[Next] | None = None

    def accept(self, token_id: int) -> None:
        """The answer goes on with `token_id`: start to compute the next mask, and return at once."""
        before = self._wait()
        self._next = self._worker.submit(self._advance, before, token_id)

    def mask(self) -> np.ndarray:
        """Tokens allowed next: int32 [ceil(vocab_size / 32)], bit i of word w is token id 32w + i; read-only.

        End tokens are allowed exactly when the answer may end. Waits for the worker. Raises InvalidRequest when the
        grammar turned out too complex to go on with, EngineFailure when the last token was not allowed.
        """
        return self._wait().mask

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may follow. Waits and raises like `mask`."""
        return self._wait().finished

    def _wait(self) -> Next:
        if self._next is not None:
            self._now = self._next.result()  # stays when it raises: every later call raises too
            self._next = None
        return self._now

    def _advance(self, before: Next, token_id: int) -> Next:
        word, bit = divmod(token_id, 32)
        if not 0 <= word < len(before.mask) or not int(before.mask[word]) >> bit & 1:
            raise EngineFailure(f"token {token_id} is not allowed by the grammar of its answer")
        self._matcher.consume_token(token_id)
        try:
            return _next(self._vocabulary, self._matcher)
        except ValueError as error:
            self._fail()
            raise InvalidRequest(f"the answer cannot go on in its grammar: {error}") from None


def _next(vocabulary: Vocabulary, matcher: LLMatcher) -> Next:
    """Raises ValueError when the library gave up: then its mask would allow an end, which would be a lie."""
    mask = vocabulary.mask(matcher)
    if matcher.is_error():
        raise ValueError(_reason(matcher.get_error()))
    if not mask.any():
        raise ValueError("no token can follow")
    return Next(mask, finished=not np.any(mask & ~vocabulary.ends))


def _reason(message: str) -> str:
    """The library's message as one short line. NoExtension means that no text matches; a regex is quoted at length."""
    if message.startswith("NoExtension"):
        return "no answer can match it"
    if "regex parse error" in message:
        message = "invalid regex: " + message.rpartition("error: ")[2].split("\n")[0]
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= 240 else f"{line[:237]}..."


class Grammar:
    """One compiled grammar; `start` gives each answer its own state. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, source: str, worker: ThreadPoolExecutor) -> None:
        """Raises ValueError when the source is no grammar, no text can match it, or it is too complex."""
        self._vocabulary = vocabulary
        self._source = source
        self._worker = worker
        self._lock = threading.Lock()
        self._answers = 0
        self._matcher = self._compiled()
        self._first = _next(vocabulary, self._matcher)
        self._try_one_token()

    def start(self) -> GrammarState:
        """The state of a new answer, whose first mask is already there."""
        with self._lock:
            if self._answers == MAX_ANSWERS:
                self._matcher, self._answers = self._compiled(), 0
            self._answers += 1
            matcher = self._matcher.deep_copy()
        return GrammarState(self._vocabulary, matcher, self._first, self._worker, self._renew)

    def _try_one_token(self) -> None:
        """A regex as large as the limits allow fails at its first derivative: find that out before it is accepted."""
        allowed = allowed_ids(self._first.mask & ~self._vocabulary.ends)
        if len(allowed):
            probe = self._matcher.deep_copy()
            probe.consume_token(int(allowed[0]))
            _next(self._vocabulary, probe)

    def _renew(self) -> None:
        """After a failure, the next answer gets a fresh automaton."""
        with self._lock:
            self._answers = MAX_ANSWERS

    def _compiled(self) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary.tokenizer, self._source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ValueError(_reason(matcher.get_error()))
        warnings = matcher.get_grammar_warnings()
        if warnings:
            raise ValueError(_reason("; ".join(warnings)))
        return matcher


class Grammars:
    """Compiles grammars for one tokenizer and keeps them; `close` ends its worker thread."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, stop_token_ids: Iterable[int]) -> None:
        """A tokenizer that the library cannot read is no error here: `compile` then refuses with the reason."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, Any], Grammar] = OrderedDict()
        self._vocabulary: Vocabulary | None = None
        self._why_not = ""
        try:
            self._vocabulary = Vocabulary.read(tokenizer_file, vocab_size, stop_token_ids)
        except OSError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self._why_not = _reason(str(error))

    def compile(self, kind: str, value: Any) -> Grammar:
        """The grammar of one of options.STRUCTURES, from the cache when it is there; `value` is the checked option.

        Takes 1 to 10 ms as a rule. Raises InvalidRequest naming the option and why nothing, or not this, can follow it.
        """
        if self._vocabulary is None:
            raise InvalidRequest(f"{kind} is not available with this model: {self._why_not}")
        key = (kind, value)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        try:
            grammar = Grammar(self._vocabulary, grammar_source(kind, value), self._worker)
        except ValueError as error:
            raise InvalidRequest(f"{kind} cannot be followed: {error}") from None
        with self._lock:
            grammar = self._compiled.setdefault(key, grammar)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return grammar

    def close(self) -> None:
        """End the worker thread; states that were started must not be used any more."""
        self._worker.shutdown(wait=False, cancel_futures=True)

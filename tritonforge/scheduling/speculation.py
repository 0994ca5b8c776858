"""Speculative decoding by prompt lookup: guess the next tokens from what followed the same n-gram before. Pure.

The Scheduler asks `Speculation.propose` for drafts, which the next step verifies; the engine loop tells it which
requests have ended. Drafts change the speed of an answer, not its tokens: a guess counts only where it is drawn, too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tritonforge.errors import InvalidRequest
from tritonforge.scheduling.request import Request

NGRAM_SIZES = (8, 4, 2, 1)
"""Lengths of the n-grams that are looked up, longest first. Replaying the benchmark's edits, these were 1% faster than
4 to 1, and 0.5% slower than 8 to 1, whose index is twice as large."""

DRAFT_LENGTH = 8
"""Tokens of a draft, always: an engine may need long to get ready for another number of rows, so the number stays while
a request drafts. On the benchmark's sets 6 to 10 are about equal."""

MEAN_STEPS = 5
"""Steps over which a request's expected gain is averaged before it stops to draft."""

STOP_MARGIN = 1.5
"""A request drafts on while it expects to gain so many times the cost: expectations are a bit too high, because guesses
that follow each other fail together."""

MEMORY = 0.95
"""What an observation still weighs after one more of its kind: about the last 20 count."""

PRIOR_WEIGHT = 4.0
"""Observations that the prior is worth, for ever: a request that failed at first is believed again."""

PRIOR = (0.2, 0.5, 0.6, 0.7, 0.7, 0.75, 0.8, 0.85, 0.9, 0.9, 0.92, 0.95)
"""How often the guess after a match of 1, 2, ... tokens was right in greedy answers of SmolLM2-135M, as measured by
benchmarks/speculation.py. Edits and free chat differ in how long their matches are, much less in this."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Duration of a decode step in any unit: fixed + per_sequence * n for n sequences, and for each that has a draft
    of d tokens also per_draft + per_draft_token * d; and per_change when its number of rows is not that of the last.

    The defaults are for OpenVINO with SmolLM2-135M in int8 on two cores, as benchmarks/speculation.py --cost measures
    them; the unit is the step of one sequence. A bf16 release gains more than they say. They are not learned from
    durations at run time: so the same load makes the same steps again, and the same logits to the last bit.
    """

    fixed: float = 0.9
    per_sequence: float = 0.1
    per_draft: float = 0.1
    per_draft_token: float = 0.04
    per_change: float = 0.55

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise InvalidRequest(f"speculation.{name} must be finite and at least 0, got {value!r}")

    def per_token(self, num_running: int) -> float:
        """Cost of one token of a plain step of `num_running` sequences: what an accepted draft token saves."""
        return self.fixed / num_running + self.per_sequence

    def of_draft(self, length: int) -> float:
        """What a draft of `length` tokens adds to a step."""
        return self.per_draft + self.per_draft_token * length


class Acceptance:
    """How often guesses come true in one request, by the length of the match: a decayed mean over a prior."""

    def __init__(self) -> None:
        self._hits = [PRIOR_WEIGHT * prior for prior in PRIOR]
        self._weights = [PRIOR_WEIGHT] * len(PRIOR)

    def observe(self, match: int, *, correct: bool) -> None:
        """Learn from the guess after a match of `match` tokens, at least 1."""
        index = min(match, len(PRIOR)) - 1
        forgotten = (1.0 - MEMORY) * PRIOR_WEIGHT
        self._hits[index] = MEMORY * self._hits[index] + forgotten * PRIOR[index] + correct
        self._weights[index] = MEMORY * self._weights[index] + forgotten + 1.0

    def rate(self, match: int) -> float:
        """Expected share of right guesses after a match of `match` tokens, at least 1."""
        index = min(match, len(PRIOR)) - 1
        return self._hits[index] / self._weights[index]


class PromptLookup:
    """An index of the n-grams of one request, prompt and output, that grows with it (prompt lookup, Saxena 2023).

    The guess is what followed the latest earlier occurrence of the longest n-gram of NGRAM_SIZES that the text ends
    with; `match` is how many tokens before both are equal, 0 without a guess, and counted to len(PRIOR) at most.
    Each token appended tells whether the guess was right, drafted or not. So a request for which drafts do not pay is
    watched at no cost, and drafts come back when it begins to repeat itself.
    """

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._tokens: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}
        self._guess: int | None = None
        self.match = 0
        self.acceptance = Acceptance()
        for token_id in token_ids:
            self._push(token_id)
        self._look_up()

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token_id: int) -> None:
        """Add the next output token, and learn whether it was guessed. O(1)."""
        if self._guess is not None:
            self.acceptance.observe(self.match, correct=self._tokens[self._guess] == token_id)
        self._push(token_id)
        self._look_up()

    def propose(self, most: int) -> list[int]:
        """What followed the match, at most `most` tokens; none without a match.

        Where the match is so late that its continuation runs into the end of the text, the draft continues as its own
        copy, as in LZ77: after "a b a" it is "b a b a ...".
        """
        if self._guess is None:
            return []
        period = len(self._tokens) - self._guess
        return [self._tokens[self._guess + index % period] for index in range(most)]

    def expected(self, length: int) -> float:
        """How many tokens of a draft of `length` are expected to be accepted; 0 without a match."""
        accepted, chance = 0.0, 1.0
        for index in range(length if self.match else 0):
            chance *= self.acceptance.rate(self.match + index)
            accepted += chance
        return accepted

    def _push(self, token_id: int) -> None:
        """Add a token. Only now the n-grams before it are indexed: each one found is followed by a token."""
        end = len(self._tokens)
        for size in NGRAM_SIZES:
            if size <= end:
                self._follows[tuple(self._tokens[end - size :])] = end
        self._tokens.append(token_id)

    def _look_up(self) -> None:
        """Find the guess and the match it follows."""
        tokens, end = self._tokens, len(self._tokens)
        self._guess, self.match = None, 0
        for size in NGRAM_SIZES:
            found = self._follows.get(tuple(tokens[end - size :])) if size <= end else None
            if found is not None:
                while size < min(found, len(PRIOR)) and tokens[found - size - 1] == tokens[end - size - 1]:
                    size += 1
                self._guess, self.match = found, size
                return


class Drafting:
    """Whether one request drafts. It begins when the next step alone would pay for its share of beginning and ending;
    it ends when the mean over some steps does not pay for the drafts."""

    def __init__(self, cost: StepCost) -> None:
        self.on = False
        self._mean = 0.0
        self._cost = cost
        self._end = STOP_MARGIN * cost.of_draft(DRAFT_LENGTH)

    def update(self, gain: float, num_running: int) -> bool:
        """Take the expected gain of a draft in the next step, in the unit of the cost; return whether to make it.

        A step changes its number of rows once, however many sequences begin: so they share what that costs.
        """
        if self.on:
            self._mean += (gain - self._mean) / MEAN_STEPS
            self.on = self._mean >= self._end
        elif gain >= max(self._end, self._cost.of_draft(DRAFT_LENGTH) + 2 * self._cost.per_change / num_running):
            self.on, self._mean = True, gain
        return self.on


class Speculation:
    """The lookups of an engine loop's requests, and the rule for when drafts pay.

    The more sequences share a step, the less an accepted token saves: in a larger batch all requests stop to draft.
    What is kept of a request is made when its first draft is asked for; `forget` drops it when the request has ended.
    """

    def __init__(self, num_running: Callable[[], int], cost: StepCost | None = None) -> None:
        """`num_running` tells how many sequences share the next step."""
        self._num_running = num_running
        self._cost = StepCost() if cost is None else cost
        self._followed: dict[int, tuple[PromptLookup, Drafting]] = {}

    def __len__(self) -> int:
        return len(self._followed)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """A draft of what `request` says next: DRAFT_LENGTH tokens, or none where drafts do not pay or `most` is less.

        A request that drafts and finds no match in between repeats its last token, to keep the number of rows.
        """
        if request.key not in self._followed:
            self._followed[request.key] = PromptLookup(request.prompt_ids), Drafting(self._cost)
        lookup, drafting = self._followed[request.key]
        for token_id in request.output_ids[len(lookup) - len(request.prompt_ids) :]:
            lookup.append(token_id)
        num_running = max(1, self._num_running())
        gain = lookup.expected(DRAFT_LENGTH) * self._cost.per_token(num_running)
        if not drafting.update(gain, num_running) or most < DRAFT_LENGTH:
            return ()
        return lookup.propose(DRAFT_LENGTH) or [request.tokens(len(lookup) - 1, len(lookup))[0]] * DRAFT_LENGTH

    def forget(self, key: int) -> None:
        """Drop what is kept for the request `key`, if anything."""
        self._followed.pop(key, None)

"""What a step's logits become: drawn tokens, verified drafts, and log-probabilities of prompts.

The engine loop calls it between the engine's step and the scheduler's commit. A draft is verified by drawing row after
row as if there were none, and going on while the drawn token is the guessed one: so speculation changes no token and no
distribution, whatever the options (a draw is a function of seed, index and logits alone, see sampling.py).
"""

from collections.abc import Mapping

import numpy as np

from tritonforge.answer import Answer
from tritonforge.engines.base import SequenceStep
from tritonforge.errors import EngineFailure, InvalidRequest, TritonForgeError
from tritonforge.sampling.sampling import Drawn, sample, token_logprobs
from tritonforge.scheduling.request import StepPlan, Work

NO_NUMBERS = "the engine's logits are no numbers"

Outcome = list[Drawn] | TritonForgeError
"""The tokens that one work of a step drew, or why it could not."""


def sequence_steps(plan: StepPlan, answers: Mapping[int, Answer]) -> list[SequenceStep]:
    """What the engine computes for `plan`; `answers` are found by their request's key."""
    return [
        SequenceStep(
            work.token_ids(),
            work.request.num_computed_tokens,
            work.request.block_table,
            _num_rows(work, answers[work.request.key]),
        )
        for work in plan.work
    ]


def draw_step(plan: StepPlan, logits: np.ndarray, answers: Mapping[int, Answer]) -> list[Outcome]:
    """An outcome for each work of `plan` that samples, in order; also records log-probabilities of prompts.

    `logits` [rows, vocab_size] are those of sequence_steps, and may be overwritten. Raises EngineFailure when those of
    a prompt are no numbers.
    """
    outcomes: dict[int, Outcome] = {}
    plain: list[tuple[int, Answer]] = []
    end = 0
    for work in plan.work:
        answer = answers[work.request.key]
        start, end = end, end + _num_rows(work, answer)
        if answer.owes_prompt_logprobs and not work.request.output_ids:
            _tell_prompt(work, answer, logits[start:end])
        if work.draft:
            outcomes[work.request.key] = _verify(work, answer, logits[start:end])
        elif work.samples:
            plain.append((end - 1, answer))
    outcomes |= _draw_one_each(plain, logits)
    return [outcomes[work.request.key] for work in plan.work if work.samples]


def _num_rows(work: Work, answer: Answer) -> int:
    """Rows of logits that a work needs: for log-probabilities of its prompt, those of all its tokens."""
    tells_prompt = answer.owes_prompt_logprobs and not work.request.output_ids
    return work.num_new_tokens if tells_prompt else work.num_logits


def _tell_prompt(work: Work, answer: Answer, rows: np.ndarray) -> None:
    """The row of position i tells of token i + 1; rows that a preempted request computes again are not told again."""
    first = work.request.num_computed_tokens
    told = len(answer.prompt_logprobs)
    stop = min(first + work.num_new_tokens, len(work.request.prompt_ids) - 1)
    following = work.request.tokens(told + 1, stop + 1)
    drawn = token_logprobs(rows[told - first : stop - first], following, answer.num_prompt_logprobs)
    if None in drawn:
        raise EngineFailure(NO_NUMBERS)
    answer.prompt_logprobs += drawn


def _draw_one_each(plain: list[tuple[int, Answer]], logits: np.ndarray) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    rows, drawing, draws = [], [], []
    for row, answer in plain:
        try:
            draws.append(answer.draw(0))
        except TritonForgeError as error:
            outcomes[answer.request.key] = error
            continue
        rows.append(row)
        drawing.append(answer)
    if len(rows) < len(logits):
        logits = logits[rows]
    for answer, drawn in zip(drawing, sample(logits, draws), strict=True):
        outcomes[answer.request.key] = _accepted(answer, drawn)
    return outcomes


def _verify(work: Work, answer: Answer, rows: np.ndarray) -> Outcome:
    """Draw from row after row, until the token is not the guessed one, or ends the answer."""
    tokens: list[Drawn] = []
    for offset, guess in enumerate((*work.draft, None)):
        try:
            [drawn] = sample(rows[offset : offset + 1], [answer.draw(offset)])
        except TritonForgeError as error:
            return error
        outcome = _accepted(answer, drawn)
        if not isinstance(outcome, list):
            return outcome
        tokens += outcome
        if drawn.token_id != guess or drawn.token_id in work.request.stop_token_ids:
            break
    return tokens


def _accepted(answer: Answer, drawn: Drawn | None) -> Outcome:
    if drawn is None and answer.constrained:
        return InvalidRequest("the options leave no token that could come next")
    if drawn is None:
        return EngineFailure(NO_NUMBERS)
    try:
        answer.accept(drawn.token_id)
    except TritonForgeError as error:
        return error
    return [drawn]

"""One of the n answers to a request: what its tokens are drawn with, and the text they make.

The engine loop makes it and is the only caller. Its scheduler state is a Request; the tokens here are those that were
drawn, the scheduler's are those that were committed.
"""

from dataclasses import replace
from hashlib import blake2b

from tritonforge.generate_request import GenerateRequest, SamplingParams
from tritonforge.sampling.logits import History, needs_history
from tritonforge.sampling.sampling import Draw, Drawn
from tritonforge.scheduling.request import FinishReason, Request, TokenEvent
from tritonforge.structured.constraints import Grammar
from tritonforge.text import Decode, TextStream


class Answer:
    """See the module's docstring. `prompt_logprobs` holds what was told so far of prompt tokens 1, 2, ...

    `num_told_tokens` are the tokens that the client has been told of: a stop string may end the answer before the last
    one that was committed.
    """

    def __init__(
        self, asked: GenerateRequest, request: Request, index: int, decode: Decode, grammar: Grammar | None
    ) -> None:
        self.request = request
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.num_told_tokens = 0
        self.prompt_logprobs: list[Drawn] = []
        self.decode = decode
        self._asked = asked
        self._params = sample_params(asked.sampling, index)
        self._history = History(self._params, request.prompt_ids) if needs_history(self._params) else None
        self._state = None if grammar is None else grammar.start()
        self._text = TextStream(decode, asked.stop, asked.include_stop_in_output)

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be told."""
        asked = self._asked
        return asked.prompt_logprobs is not None and len(self.prompt_logprobs) < len(asked.prompt_ids) - 1

    @property
    def num_prompt_logprobs(self) -> int:
        """How many of the most likely tokens are told with each prompt token."""
        return self._asked.prompt_logprobs or 0

    @property
    def constrained(self) -> bool:
        """Whether options may leave no token to draw."""
        return self._state is not None or self._history is not None or self._params.min_tokens > 0

    def draw(self, offset: int) -> Draw:
        """What the token `offset` places after the committed ones is drawn with.

        Raises InvalidRequest or EngineFailure when its structure cannot be followed any further.
        """
        index = len(self.request.output_ids) + offset
        ends = self.request.stop_token_ids if index < self._params.min_tokens else ()
        mask = None if self._state is None else self._state.mask()
        return Draw(self._params, index, self._history, tuple(ends), mask)

    def accept(self, token_id: int) -> None:
        """The answer goes on with a token that was drawn."""
        if self._history is not None:
            self._history.append(token_id)
        if self._state is not None and token_id not in self.request.stop_token_ids:
            self._state.accept(token_id)

    def tell(self, event: TokenEvent) -> str:
        """The text that a committed token adds; sets finish_reason when the answer ends with it."""
        self.num_told_tokens += 1
        by_token = event.finish_reason is FinishReason.STOP
        shown = None if by_token and not self._asked.include_stop_in_output else event.token_id
        may_stop = self.num_told_tokens >= self._params.min_tokens
        text = self._text.push(shown, final=event.finish_reason is not None, may_stop=may_stop)
        self.finish_reason = FinishReason.STOP if self._text.stopped else event.finish_reason
        return text

    def end(self, reason: FinishReason) -> str:
        """End without another token; the text that was held back."""
        self.finish_reason = reason
        return "" if self._text.stopped else self._text.push(None, final=True)


def sample_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of sample `index`: each draws other random numbers, the first those of the request's seed."""
    if index == 0 or params.seed is None:
        return params
    digest = blake2b(b"%d %d" % (params.seed, index), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest, "little") >> 1)

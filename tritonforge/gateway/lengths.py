"""How many tokens answers may have, and how many are reserved for them. Pure; the exchange asks."""

from collections.abc import Sequence

from tritonforge.gateway.routing.backend import Prompt
from tritonforge.gateway.work import Work


def max_tokens(work: Work, prompt: Prompt, max_model_len: int | None) -> int | None:
    """Tokens that each answer may have; None lets the decoder decide, where the context's length is not known.

    Nothing is cut here: too many are refused by the decoder, with its rule.
    """
    if work.max_tokens is not None or max_model_len is None:
        return work.max_tokens
    return max(1, max_model_len - len(prompt.token_ids))


def reserved_tokens(n: int, prompts: Sequence[Prompt], limits: Sequence[int | None], max_model_len: int | None) -> int:
    """Tokens to reserve for prompts and their `n` answers each, which have at most `limits` tokens.

    More than the context leaves cannot come, so no more is reserved: the decoder refuses such a request by its rule.
    """
    needed = 0
    for prompt, limit in zip(prompts, limits, strict=True):
        most = limit or 0
        if max_model_len is not None:
            most = min(most, max(1, max_model_len - len(prompt.token_ids)))
        needed += len(prompt.token_ids) + n * most
    return needed

"""Deltas of a request as the tensors of one response, by the names of contract.py. It knows no Triton type."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tritonforge.contract import (
    FINISH_REASON,
    INDEX,
    LOGPROBS,
    PROMPT_LOGPROBS,
    PROMPT_TOKEN_IDS,
    PROMPT_TOP_IDS,
    PROMPT_TOP_LOGPROBS,
    STATISTICS,
    TEXT_OUTPUT,
    TOKEN_COUNTS,
    TOKEN_IDS,
    TOOL_CALLS,
    TOP_IDS,
    TOP_LOGPROBS,
)
from tritonforge.generate_request import GenerateRequest
from tritonforge.generation import Delta, PromptEcho
from tritonforge.sampling.sampling import Drawn
from tritonforge.structured.tool_calls import ToolCall

Tensors = dict[str, np.ndarray]


@dataclass
class Gain:
    """What one answer gained by several deltas."""

    text: str = ""
    drawn: list[Drawn] = field(default_factory=list)
    finish_reason: str = ""
    tool_calls: tuple[ToolCall, ...] | None = None


def response_tensors(
    asked: GenerateRequest, deltas: Sequence[Delta], statistics: Mapping[str, int] | None = None
) -> Tensors:
    """`deltas` merged, without a batch dimension; `statistics` for the last response only."""
    gains: dict[int, Gain] = {}
    tensors: Tensors = {}
    for delta in deltas:
        gain = gains.setdefault(delta.index, Gain())
        if delta.prompt is not None:
            gain.text += delta.prompt.text
            tensors |= _prompt_tensors(delta.prompt)
        gain.text += delta.text
        gain.drawn += delta.drawn
        gain.finish_reason = delta.finish_reason or gain.finish_reason
        gain.tool_calls = gain.tool_calls or delta.tool_calls
    answers = list(gains.values())
    drawn = [one for answer in answers for one in answer.drawn]
    tensors[TEXT_OUTPUT.name] = _strings([answer.text for answer in answers])
    tensors[TOKEN_IDS.name] = np.array([one.token_id for one in drawn], np.int32)
    if any(answer.finish_reason for answer in answers):
        tensors[FINISH_REASON.name] = _strings([answer.finish_reason for answer in answers])
    if asked.n > 1:
        tensors[INDEX.name] = np.array(list(gains), np.int32)
        tensors[TOKEN_COUNTS.name] = np.array([len(answer.drawn) for answer in answers], np.int32)
    if asked.sampling.logprobs is not None:
        tensors |= _logprob_tensors(drawn, LOGPROBS.name, TOP_IDS.name, TOP_LOGPROBS.name)
    if any(answer.tool_calls is not None for answer in answers):
        tensors[TOOL_CALLS.name] = _strings([_calls_json(answer.tool_calls or ()) for answer in answers])
    for tensor in STATISTICS if statistics is not None else ():
        tensors[tensor.name] = np.array([statistics[tensor.name]], np.int64)
    return tensors


def _prompt_tensors(prompt: PromptEcho) -> Tensors:
    tensors: Tensors = {PROMPT_TOKEN_IDS.name: np.array(prompt.token_ids, np.int32)}
    if prompt.logprobs is not None:
        tensors |= _logprob_tensors(
            prompt.logprobs, PROMPT_LOGPROBS.name, PROMPT_TOP_IDS.name, PROMPT_TOP_LOGPROBS.name
        )
    return tensors


def _logprob_tensors(drawn: Sequence[Drawn], logprobs: str, top_ids: str, top_logprobs: str) -> Tensors:
    """[tokens] log-probabilities; and, when any were asked for, [tokens, k] most likely ids and theirs."""
    tensors = {logprobs: np.array([one.logprob for one in drawn], np.float32)}
    if drawn and drawn[0].top:
        tensors[top_ids] = np.array([[token_id for token_id, _ in one.top] for one in drawn], np.int32)
        tensors[top_logprobs] = np.array([[value for _, value in one.top] for one in drawn], np.float32)
    return tensors


def _strings(texts: Sequence[str]) -> np.ndarray:
    return np.array([text.encode() for text in texts], object)


def _calls_json(calls: Sequence[ToolCall]) -> str:
    return json.dumps([{"id": one.id, "name": one.name, "arguments": one.arguments} for one in calls])

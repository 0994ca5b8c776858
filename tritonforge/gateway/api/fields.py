"""Every field of OpenAI's two requests, and what becomes of it: the one table that code, documents and tests share.

`schemas.py` declares the honoured ones. A refused one is refused by its name unless it is null, which is absent.
The lists are those of openai-python 3.57.0, `CompletionCreateParams` of chat and of completions.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """A documented field; `note` says what it does here, or why it is refused."""

    name: str
    honoured: bool
    note: str


def _yes(name: str, note: str) -> Field:
    return Field(name, True, note)


def _no(name: str, why: str) -> Field:
    return Field(name, False, why)


_BOTH = (
    _yes("model", "a name of `/v1/models`"),
    _yes("frequency_penalty", "in [-2, 2]"),
    _yes("logit_bias", "token id to a number in [-100, 100]"),
    _yes("n", "1 to 16 answers, which share the prompt's KV blocks"),
    _yes("presence_penalty", "in [-2, 2]"),
    _yes("seed", "an integer in [0, 2**63 - 1]; a negative one is refused"),
    _yes("stop", "a string, or up to 16"),
    _yes("stream", "server-sent events"),
    _yes("stream_options", "`include_usage`; `include_obfuscation` may only be false"),
    _yes("temperature", "in [0, 2]; 1 when absent"),
    _yes("top_p", "in (0, 1]; 1 when absent"),
    _yes("user", "kept in the record of the request"),
)

CHAT = (
    *_BOTH,
    _yes("messages", "roles developer, system, user, assistant, tool; parts of text only"),
    _yes("logprobs", "needs the release's tokenizer at the edge"),
    _yes("max_completion_tokens", "what the context leaves when absent"),
    _yes("max_tokens", "the old name of max_completion_tokens; not both"),
    _yes("modalities", '`["text"]`; another one is refused'),
    _yes("parallel_tool_calls", "false: one call at most"),
    _yes("response_format", "text, json_object, json_schema; a schema always holds, strict or not"),
    _yes("safety_identifier", "kept in the record of the request, as `user` is"),
    _yes("service_tier", "auto and default; flex takes the least urgent class; others are refused"),
    _yes("store", "false: nothing is stored anyway; true is refused"),
    _yes("tool_choice", "none, auto, required, a function, allowed_tools"),
    _yes("tools", "functions; custom tools are refused"),
    _yes("top_logprobs", "0 to 20"),
    _no("audio", "the models answer in text"),
    _no("function_call", "use tool_choice"),
    _no("functions", "use tools"),
    _no("metadata", "nothing is stored that it could be attached to"),
    _no("moderation", "no moderation model is served"),
    _no("prediction", "tokens are guessed from the prompt, without being told any"),
    _no("prompt_cache_key", "prefixes are found without a key, within a tenant"),
    _no("prompt_cache_options", "the prefix cache has no options"),
    _no("prompt_cache_retention", "the prefix cache keeps what fits"),
    _no("reasoning_effort", "the models have no levels of reasoning"),
    _no("verbosity", "the models have no levels of verbosity"),
    _no("web_search_options", "nothing is searched"),
)

COMPLETIONS = (
    *_BOTH,
    _yes("prompt", "a text, token ids, or a list of either"),
    _yes("echo", "the prompt before the answer, with its log-probabilities when they are asked for"),
    _yes("logprobs", "0 to 20; needs the release's tokenizer at the edge"),
    _yes("max_tokens", "16 when absent, as OpenAI has it"),
    _no("best_of", "ask for n answers with logprobs, and choose"),
    _no("suffix", "the models insert nothing"),
)

EXTENSIONS = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "speculate",
    "truncate",
    "timeout_ms",
)
"""Options of the models (docs/options.md) that both requests take beside OpenAI's fields, under their own names."""

REFUSED_CHAT = {field.name: field.note for field in CHAT if not field.honoured}
REFUSED_COMPLETIONS = {field.name: field.note for field in COMPLETIONS if not field.honoured}

"""From a checked request to what the served models are asked: prompts and options. Pure.

The endpoints call `of_chat` and `of_completion`; the service tokenizes the prompts and sends the options to `decoder`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritonforge.gateway.api.chat_messages import Message, instruct, of_request
from tritonforge.gateway.api.errors import invalid
from tritonforge.gateway.api.fields import EXTENSIONS
from tritonforge.gateway.api.schemas import ChatRequest, CompletionRequest, JsonSchemaFormat, TokenizeRequest
from tritonforge.gateway.api.tools import ToolUse, plan_tools, write_plainly
from tritonforge.gateway.config import Tenant
from tritonforge.options import PRIORITIES

COMPLETION_MAX_TOKENS = 16
"""What OpenAI's completions default to; a chat's answer may fill the context."""

PASSED_ON = ("frequency_penalty", "n", "presence_penalty", "seed", "top_p", *EXTENSIONS)
"""Fields that are options of the same name and form; `truncate` is the tokenizer's."""
TEMPERATURE = 1.0


@dataclass(frozen=True)
class PromptSource:
    """One prompt before it is token ids: a text, token ids, or (text empty) the option `messages`."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """What one request asks of its model.

    `options` are those of `decoder` without max_tokens, `n` how many answers each prompt gets; `top_logprobs` None: no
    log-probabilities; `tools` says how calls are read out of the answers. `asked` is the request itself.
    """

    model: str
    prompts: tuple[PromptSource, ...]
    options: Mapping[str, Any]
    n: int = 1
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    top_logprobs: int | None = None
    echo: bool = False
    tools: ToolUse | None = None
    user: str = ""
    service_tier: str = "default"
    asked: ChatRequest | CompletionRequest | None = None


def of_chat(asked: ChatRequest, tenant: Tenant, *, takes_tools: bool) -> Work:
    """The work of a chat completion. `takes_tools`: the model's chat template writes tools itself.

    Raises ApiError for fields that exclude each other.
    """
    if asked.max_tokens is not None and asked.max_completion_tokens is not None:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens exclude each other: give one of them")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise invalid("top_logprobs", "top_logprobs must come with logprobs: true")
    messages = [of_request(message.model_dump(exclude_none=True)) for message in asked.messages]
    options = _options(asked, tenant)
    structure, messages = _structure(asked, messages)
    tools = plan_tools(asked, messages, takes_tools=takes_tools)
    if tools is not None:
        messages = tools.messages
        if structure and tools.options:
            raise invalid("response_format", "response_format must be text when tools may be called")
        options |= tools.options
    if asked.service_tier == "flex":
        options["priority_class"] = PRIORITIES - 1
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    if logprobs is not None:
        options["logprobs"] = logprobs
    prompt = {"messages": json.dumps(messages, ensure_ascii=False)} | _truncation(asked)
    if tools is not None and tools.native is not None:
        prompt["tools"] = tools.native
    return Work(
        asked.model,
        (PromptSource(options=prompt),),
        options | structure,
        n=asked.n or 1,
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        top_logprobs=logprobs,
        tools=tools,
        user=asked.user or asked.safety_identifier or "",
        service_tier="flex" if asked.service_tier == "flex" else "default",
        asked=asked,
        **_streaming(asked),
    )


def of_completion(asked: CompletionRequest, tenant: Tenant, max_prompts: int) -> Work:
    """The work of a completion: one prompt, or several that are answered side by side. Raises ApiError."""
    options = _options(asked, tenant)
    if asked.logprobs is not None:
        options["logprobs"] = asked.logprobs
    if asked.echo:
        options["echo"] = True
        if asked.logprobs is not None:
            options["prompt_logprobs"] = asked.logprobs
    prompts = _prompts(asked.prompt, _truncation(asked))
    if len(prompts) > max_prompts:
        raise invalid("prompt", f"prompt must hold at most {max_prompts} prompts, got {len(prompts)}")
    return Work(
        asked.model,
        prompts,
        options,
        n=asked.n or 1,
        max_tokens=asked.max_tokens or COMPLETION_MAX_TOKENS,
        top_logprobs=asked.logprobs,
        echo=bool(asked.echo),
        user=asked.user or "",
        asked=asked,
        **_streaming(asked),
    )


def _streaming(asked: ChatRequest | CompletionRequest) -> dict[str, bool]:
    given = asked.stream_options
    if given is not None and not asked.stream:
        raise invalid("stream_options", "stream_options must come with stream: true")
    return {"stream": bool(asked.stream), "include_usage": bool(given and given.include_usage)}


def _options(asked: ChatRequest | CompletionRequest, tenant: Tenant) -> dict[str, Any]:
    """The options that both requests have. A tenant's prefixes are its own: nobody learns of them by timing."""
    options = {name: getattr(asked, name) for name in PASSED_ON if getattr(asked, name) is not None}
    options.pop("truncate", None)
    options["temperature"] = TEMPERATURE if asked.temperature is None else float(asked.temperature)
    options["stream"] = bool(asked.stream)
    options |= {"tenant": tenant.name, "cache_salt": tenant.name, "priority_class": tenant.priority_class}
    if asked.stop is not None:
        options["stop"] = [asked.stop] if isinstance(asked.stop, str) else asked.stop
    if asked.logit_bias:
        options["logit_bias"] = json.dumps(asked.logit_bias)
    return options


def _truncation(asked: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """What the tokenizer needs to cut a prompt that is too long."""
    if asked.truncate in (None, "none"):
        return {}
    most = asked.max_tokens or getattr(asked, "max_completion_tokens", None)
    return {"truncate": asked.truncate} | ({"max_tokens": most} if most else {})


def _prompts(prompt: Any, options: Mapping[str, Any]) -> tuple[PromptSource, ...]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    if options and not isinstance(prompt[0], str):
        raise invalid("truncate", "truncate must go with a prompt of text: token ids are sent as they are")
    if not all(prompt):
        raise invalid("prompt", "prompt must not be empty")
    return tuple(
        PromptSource(text=one, options=options) if isinstance(one, str) else PromptSource(token_ids=tuple(one))
        for one in prompt
    )


def _structure(asked: ChatRequest, messages: list[Message]) -> tuple[dict[str, Any], list[Message]]:
    """The option that response_format is, and the chat: a schema's description is said to the model."""
    form = asked.response_format
    if form is None or form.type == "text":
        return {}, messages
    if not isinstance(form, JsonSchemaFormat):
        return {"json_object": True}, messages
    schema = form.json_schema
    if schema.schema_ is None:
        raise invalid("response_format.json_schema.schema", "response_format.json_schema must have a schema")
    if schema.description:
        messages = instruct(messages, f"Answer in the JSON format {schema.name}: {schema.description}")
    return {"json_schema": json.dumps(schema.schema_, ensure_ascii=False)}, messages


def of_tokenize(asked: TokenizeRequest, *, takes_tools: bool) -> PromptSource:
    """What is to be tokenized. Raises ApiError unless it is exactly one of a text and a chat."""
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("prompt", "give one of prompt and messages")
    if asked.prompt is not None:
        if asked.add_generation_prompt is not None:
            raise invalid("add_generation_prompt", "add_generation_prompt must come with messages")
        return PromptSource(text=asked.prompt)
    messages = [of_request(message.model_dump(exclude_none=True)) for message in asked.messages or ()]
    if not takes_tools:
        messages = [write_plainly(message) for message in messages]
    options: dict[str, Any] = {"messages": json.dumps(messages, ensure_ascii=False)}
    if asked.add_generation_prompt is False:
        options["add_generation_prompt"] = False
    return PromptSource(options=options)

"""The request bodies that the edge takes, as pydantic models: OpenAI's fields that are honoured, strictly typed.

`bodies.read` makes them of bytes; which fields are refused is in fields.py. What only the served model can judge (token
ids, a schema's keywords, the context's length) is left to it.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tritonforge.options import MAX_SAMPLES, MAX_STOP_LENGTH, MAX_STOP_STRINGS, MAX_TIMEOUT_MS, MAX_TOP_LOGPROBS

JSON = dict[str, Any]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_Count = Annotated[int, Field(ge=1, lt=2**31)]


class Strict(BaseModel):
    """Unknown keys are refused, and 1 is neither "1" nor true."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Strict):
    type: Literal["text"]
    text: str


_Content = str | Annotated[list[TextPart], Field(min_length=1)]


class FunctionCall(Strict):
    name: _Name
    arguments: str


class ToolCallMessage(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class InstructionMessage(Strict):
    role: Literal["developer", "system"]
    content: _Content


class UserMessage(Strict):
    role: Literal["user"]
    content: _Content


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: _Content | None = None
    tool_calls: Annotated[list[ToolCallMessage], Field(min_length=1)] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: _Content
    tool_call_id: str


Message = Annotated[
    InstructionMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


class FunctionTool(Strict):
    name: _Name
    description: str | None = None
    parameters: JSON | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionTool


class FunctionName(Strict):
    name: _Name


class NamedChoice(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1)]


class AllowedChoice(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedChoice | AllowedChoice, Field(discriminator="type")]


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: _Name
    description: str | None = None
    schema_: JSON | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Common(Strict):
    """What both requests have; null is absent."""

    model: str
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    presence_penalty: _Penalty | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: _StopString | Annotated[list[_StopString], Field(min_length=1, max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    max_tokens: _Count | None = None
    # options of the served models
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    speculate: bool | None = None
    truncate: Literal["none", "oldest"] | None = None
    timeout_ms: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_MS)] | None = None


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    max_completion_tokens: _Count | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None
    service_tier: Literal["auto", "default", "flex"] | None = None
    store: Literal[False] | None = None
    tool_choice: ToolChoice | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[_TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[_TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TokenizeRequest(Strict):
    """POST /tokenize: a text or a chat, as vLLM has it."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize, as vLLM has it."""

    model: str
    tokens: list[_TokenId]


class EmbeddingRequest(BaseModel):
    """POST /v1/embeddings; no served model makes embeddings yet, so only the model's name is read."""

    model: str
    input: Any

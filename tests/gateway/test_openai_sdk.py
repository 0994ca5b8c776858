"""OpenAI's own Python client against the gateway, with nothing but base_url and key changed.

Wrong if it failed: an application that works with OpenAI's API would not work here.
"""

import asyncio
import json

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from tests.gateway.serving import MODEL

pytestmark = pytest.mark.server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Capital(BaseModel):
    """What a structured answer must be."""

    city: str
    sure: bool


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str


def test_a_chat_is_answered_with_usage_and_the_releases_digest(sdk, release_dir):
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    digest = json.loads((release_dir / "manifest.json").read_text(encoding="utf-8"))["digest"]
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.system_fingerprint == f"fp_{digest[:16]}"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 10


def test_a_stream_joins_to_the_same_answer_and_ends_with_the_usage(sdk):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(sdk.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, **options))
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens >= 7
    assert chunks[0].choices[0].delta.role == "assistant"


def test_the_asynchronous_client_works_and_streams(gateway):
    async def ask():
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=gateway.keys["open"]) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
            stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stream=True)
            deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content, "".join(deltas)

    assert asyncio.run(ask()) == (ANSWER, ANSWER)


def test_a_pydantic_model_as_response_format_comes_back_as_an_object(sdk):
    answer = sdk.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Capital, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Capital)


def test_a_demanded_call_follows_the_functions_schema(sdk):
    answer = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None


def test_a_calls_result_goes_back_to_the_model(sdk):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    chat = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It snows in Oslo."},
    ]
    answer = sdk.chat.completions.create(model=MODEL, messages=chat, tools=[WEATHER], temperature=0, max_tokens=20)
    alone = sdk.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER], temperature=0, max_tokens=20)
    assert answer.usage.prompt_tokens > alone.usage.prompt_tokens + 20


def test_the_sdk_parses_the_arguments_of_a_strict_tool(sdk):
    answer = sdk.chat.completions.parse(
        model=MODEL,
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice={"type": "function", "function": {"name": "GetWeather"}},
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_a_streamed_call_joins_to_whole_arguments(sdk):
    with sdk.chat.completions.stream(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


def test_a_completion_continues_a_text_and_streams(sdk):
    options = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 2}
    assert sdk.completions.create(**options).choices[0].text == " Paris."
    assert "".join(one.choices[0].text for one in sdk.completions.create(**options, stream=True)) == " Paris."


def test_models_are_listed_and_found_by_name(sdk):
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).id == MODEL


def test_errors_are_the_clients_own_types(sdk, gateway):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        sdk.chat.completions.create(model="another", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="reasoning_effort") as told:
        sdk.chat.completions.create(model=MODEL, messages=QUESTION, reasoning_effort="low")
    assert (told.value.code, told.value.param) == ("unsupported_parameter", "reasoning_effort")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=gateway.base_url, api_key="sk-wrong").models.list()
    with pytest.raises(openai.BadRequestError) as told:
        sdk.completions.create(model=MODEL, prompt="a " * 5000)
    assert told.value.code == "context_length_exceeded"
    with pytest.raises(openai.UnprocessableEntityError, match="json_schema"):
        schema = {"name": "x", "schema": {"type": "object", "properties": {"a": False}, "required": ["a"]}}
        form = {"type": "json_schema", "json_schema": schema}
        sdk.chat.completions.create(model=MODEL, messages=QUESTION, response_format=form)


def test_a_model_without_embeddings_says_so(sdk):
    with pytest.raises(openai.NotFoundError, match="embeddings"):
        sdk.embeddings.create(model=MODEL, input="text")

"""LangChain's ChatOpenAI with nothing but base_url and key changed. Needs requirements/gateway-tests.txt.

Wrong if it failed: an application built on LangChain would not work here.
"""

import asyncio
from typing import Literal

import pytest
from pydantic import BaseModel

from tests.gateway.serving import MODEL

langchain_openai = pytest.importorskip("langchain_openai")
pytestmark = [pytest.mark.server, pytest.mark.slow]

QUESTION = "What is the capital of France?"


class Capital(BaseModel):
    """A capital."""

    city: Literal["Paris", "Rome"]


@pytest.fixture
def chat(gateway):
    return langchain_openai.ChatOpenAI(
        model=MODEL, base_url=gateway.base_url, api_key=gateway.keys["open"], temperature=0, max_tokens=60
    )


def test_a_question_is_answered_with_its_usage(chat):
    answer = chat.invoke(QUESTION)
    assert answer.content == "The capital of France is Paris."
    assert answer.usage_metadata["output_tokens"] == 8 and answer.response_metadata["finish_reason"] == "stop"


def test_streams_join_to_the_same_answer_also_asynchronously(chat):
    async def joined():
        return "".join([piece.content async for piece in chat.astream(QUESTION)])

    assert "".join(piece.content for piece in chat.stream(QUESTION)) == "The capital of France is Paris."
    assert asyncio.run(joined()) == "The capital of France is Paris."


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_answer_is_an_object(chat, method):
    assert isinstance(chat.with_structured_output(Capital, method=method).invoke(QUESTION), Capital)


def test_a_bound_tool_is_called_and_its_result_taken(chat):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city."""
        return f"It snows in {city}."

    bound = chat.bind_tools([weather], tool_choice="weather")
    asked = [HumanMessage("What is the weather in Oslo?")]
    call = bound.invoke(asked)
    assert [one["name"] for one in call.tool_calls] == ["weather"]
    result = weather.invoke(call.tool_calls[0])
    assert isinstance(result, ToolMessage)
    assert chat.bind_tools([weather]).invoke([*asked, call, result]).response_metadata["finish_reason"]


def test_prompts_side_by_side_are_all_answered(chat):
    assert len(chat.batch([QUESTION, "Say hello."])) == 2

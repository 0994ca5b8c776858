"""The table of OpenAI's fields. Wrong if a documented field were in no list, or if table, models and page disagreed."""

import re
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from tritonforge.gateway.api.bodies import read
from tritonforge.gateway.api.errors import ApiError
from tritonforge.gateway.api.fields import CHAT, COMPLETIONS, EXTENSIONS
from tritonforge.gateway.api.schemas import ChatRequest, CompletionRequest
from tritonforge.options import OPTIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gateway.md"
BODIES = ((CHAT, ChatRequest), (COMPLETIONS, CompletionRequest))


def params_of(*kinds: type) -> set[str]:
    return {name for kind in kinds for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}


def test_the_table_has_every_field_of_openais_client_and_no_other():
    chat = params_of(
        chat_create_params.CompletionCreateParamsBase,
        chat_create_params.CompletionCreateParamsStreaming,
        chat_create_params.CompletionCreateParamsNonStreaming,
    )
    completions = params_of(
        completion_create_params.CompletionCreateParamsBase,
        completion_create_params.CompletionCreateParamsStreaming,
        completion_create_params.CompletionCreateParamsNonStreaming,
    )
    # not in this version's types of completions, but in OpenAI's reference
    assert {field.name for field in CHAT} == chat | {"functions", "function_call"}
    assert {field.name for field in COMPLETIONS} == completions


@pytest.mark.parametrize(("table", "model"), BODIES)
def test_the_models_have_exactly_the_honoured_fields_and_the_extensions(table, model):
    honoured = [field.name for field in table if field.honoured]
    assert len(set(honoured)) == len(honoured)
    assert set(model.model_fields) == set(honoured) | set(EXTENSIONS)
    assert set(EXTENSIONS) <= set(OPTIONS)


@pytest.mark.parametrize(("table", "model"), BODIES)
def test_a_refused_field_is_refused_by_its_name_and_null_is_absent(table, model):
    for field in table:
        if not field.honoured:
            with pytest.raises(ApiError) as told:
                read(model, b'{"%s": 1}' % field.name.encode())
            assert (told.value.status, told.value.param, told.value.code) == (400, field.name, "unsupported_parameter")
            with pytest.raises(ApiError) as told:
                read(model, b'{"%s": null}' % field.name.encode())
            assert told.value.code == "missing_required_parameter"


def test_the_page_shows_the_table():
    text = PAGE.read_text(encoding="utf-8")
    for heading, table in (("Chat completions", CHAT), ("Completions", COMPLETIONS)):
        part = re.search(rf"### {heading}\n(.*?)(?=\n#|\Z)", text, re.DOTALL).group(1)
        rows = re.findall(r"^\| `(\w+)` \| (yes|refused) \| (.*) \|$", part, re.MULTILINE)
        told = [(field.name, "yes" if field.honoured else "refused", field.note) for field in table]
        assert sorted(rows) == sorted(told)

"""docs/options.md, api.md and metrics.md say what the code does. Wrong if a name or rule were in one place only."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.options_docs import code, tables  # noqa: E402
from tritonforge.contract import DECODER_OUTPUTS  # noqa: E402
from tritonforge.errors import STATUS  # noqa: E402
from tritonforge.observation import metrics  # noqa: E402
from tritonforge.options import OPTIONS, Option  # noqa: E402

ROWS = {code(row["option"]): row for rows in tables("option").values() for row in rows}
FIELDS = [(heading, code(row["field"]), code(row["ours"])) for heading, rows in tables("field").items() for row in rows]
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
METRICS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def shown_default(option: Option) -> str:
    """The default as the table shows it."""
    if option.default in (None, (), ""):
        return "none"
    return (
        str(option.default).lower()
        if option.kind is bool
        else f"{option.default:g}"
        if option.kind is float
        else str(option.default)
    )


def test_the_table_holds_each_option_once_and_no_other():
    names = [code(row["option"]) for rows in tables("option").values() for row in rows]
    assert sorted(names) == sorted(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_options_row_shows_its_type_default_and_rule(name):
    row, option = ROWS[name], OPTIONS[name]
    assert row["type"] == {str: "string"}.get(option.kind, option.kind.__name__)
    assert row["default"] == shown_default(option)
    assert f"must be {row['rule']}" == option.rule.replace("|", "\\|")
    assert len(row["meaning"]) > 10


@pytest.mark.parametrize("name", OPTIONS)
def test_an_options_proof_is_a_test_that_names_the_option(name):
    file, _, function = code(ROWS[name]["proof"]).partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    assert len(found) == 1, f"{file} has no test {function}"
    assert re.search(rf"\b{name}\b", ast.unparse(tree)), f"{file} never uses {name}"


def test_the_peers_tables_name_options_that_exist_and_refuse_what_is_none():
    assert {heading for heading, _, _ in FIELDS} == {
        "vLLM's SamplingParams",
        "vLLM's StructuredOutputsParams",
        "OpenAI's chat completions request",
        "OpenAI's completions request",
    }
    for heading, field, ours in FIELDS:
        assert ours in (*OPTIONS, "refused", "text_input"), f"{heading}: {field} is {ours}"
        assert field not in OPTIONS or ours == field, f"{heading}: {field} is an option of ours, and not {ours}"


def test_the_peers_tables_hold_no_field_twice():
    names = [(heading, field) for heading, field, _ in FIELDS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", [tensor.name for tensor in DECODER_OUTPUTS])
def test_the_api_page_explains_each_output(name):
    assert f"`{name}`" in API


def test_the_metrics_page_holds_the_table_of_the_code():
    """Written by `python -m tritonforge.observation.metrics`, below the page's own text."""
    assert METRICS.endswith(f"\n{metrics.table()}\n")


@pytest.mark.parametrize("code_", STATUS)
def test_the_api_page_explains_each_error_code(code_):
    assert f"`{code_}:`" in API

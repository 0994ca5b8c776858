"""The model repository is what the contract says, and imports go one way."""

import ast
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tritonforge.contract import SERVED_MODELS, render_config
from tritonforge.options import OPTIONS

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "tritonforge"

FORBIDDEN = {
    "errors": {""},
    "contract": {""},
    "scheduling": {"loop", "triton", "engines", "text", "generation", "decoder", "observation"},
    "scheduling/blocks": {"scheduling.scheduler", "scheduling.request"},
    "scheduling/request": {"scheduling.blocks", "scheduling.scheduler"},
    "loop": {"triton", "decoder"},
    "text": {"scheduling", "loop", "triton"},
    "sampling/sampling": {"scheduling", "loop", "triton"},
    "engines": {"scheduling", "loop", "triton", "observation"},
    "release": {"contract", "decoder", "engines", "triton", "rollout", "launch"},
    "launch": {"rollout", "gateway", "decoder", "loop", "triton"},
    "gateway": {"scheduling", "loop", "triton", "decoder", "engines"},
    "client": {"server", "triton", "loop"},
}
"""Module or package -> those of the project it must not import ("" is all but errors)."""

PURE = ("scheduling/blocks", "scheduling/scheduler", "scheduling/request")
IMPURE = {"numpy", "torch", "threading", "time", "triton_python_backend_utils", "openvino"}


def imports(path):
    """Top-level names and `tritonforge.X` parts that the file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


def own_modules(path):
    """Names below `tritonforge` that the file imports: of modules, as `loop`, and of what is taken from packages."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith("tritonforge."):
            parent = node.module.removeprefix("tritonforge").removeprefix(".")
            found |= {parent} if parent else {alias.name for alias in node.names}
    return found


def is_within(module, forbidden):
    return f"{module}.".startswith(f"{forbidden}." if forbidden else "") and module != "errors"


@pytest.mark.parametrize("name", SERVED_MODELS)
def test_config_pbtxt_is_what_the_contract_renders(name):
    text = (ROOT / "model_repository" / name / "config.pbtxt").read_text(encoding="utf-8")
    assert text == render_config(SERVED_MODELS[name])


@pytest.mark.parametrize("name", SERVED_MODELS)
def test_config_pbtxt_is_a_model_config_with_the_contracts_tensors(name):
    text = (ROOT / "model_repository" / name / "config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    model = SERVED_MODELS[name]
    assert config.name == name
    assert [tensor.name for tensor in config.input] == [tensor.name for tensor in model.inputs]
    assert [tensor.name for tensor in config.output] == [tensor.name for tensor in model.outputs]
    assert [list(tensor.dims) for tensor in config.output] == [list(tensor.dims) for tensor in model.outputs]
    assert config.model_transaction_policy.decoupled == (name == "decoder")
    assert [step.model_name for step in config.ensemble_scheduling.step] == list(model.steps)


@pytest.mark.parametrize("module", FORBIDDEN)
def test_imports_go_one_way(module):
    path = PACKAGE / module
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
        wrong = {name for name in own_modules(file) for other in FORBIDDEN[module] if is_within(name, other)}
        assert not wrong, f"{file.relative_to(PACKAGE)} must not import {sorted(wrong)}"


@pytest.mark.parametrize("module", PURE)
def test_the_core_is_pure(module):
    impure = {name.split(".")[0] for name in imports(PACKAGE / f"{module}.py")} & IMPURE
    assert not impure, f"{module} must not import {sorted(impure)}"


def test_only_triton_py_knows_pb_utils():
    knowing = [p.name for p in PACKAGE.rglob("*.py") if "triton_python_backend_utils" in imports(p)]
    assert knowing == ["triton.py"]


def test_the_serving_package_never_imports_torch():
    assert not [p for p in PACKAGE.rglob("*.py") if {"torch", "transformers"} & {n.split(".")[0] for n in imports(p)}]


def test_model_files_stay_short():
    for path in (ROOT / "model_repository").rglob("model.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 100, f"{path} has more than 100 lines"


def test_files_are_read_with_an_encoding():
    """The Python of Triton's backend starts with an ASCII locale: a file read without an encoding fails there."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "read_text":
                assert "encoding" in {keyword.arg for keyword in node.keywords}, f"{path.name}:{node.lineno}"


def test_no_document_holds_an_unfilled_place():
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")):
        assert "@@" not in path.read_text(encoding="utf-8"), f"{path.name} has a place that was never filled"


def test_every_option_has_a_rule_that_reads_after_its_name():
    assert all(option.rule.startswith("must be") for option in OPTIONS.values())

"""Fixtures of the verifier's tests; the repository root goes on sys.path, for `loadtests` is no installed package."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

for folder in (Path(__file__).resolve().parents[2], Path(__file__).resolve().parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from slo_support import DOCUMENT  # noqa: E402

from loadtests.contract import Contract  # noqa: E402
from loadtests.contract_toml import parse_contract  # noqa: E402


@pytest.fixture
def document() -> dict[str, Any]:
    return copy.deepcopy(DOCUMENT)


@pytest.fixture
def contract(document) -> Contract:
    return parse_contract(document)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer of words: each word between spaces is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words.save(str(path))
    return path

"""The licence report: every package that serves has a licence that was thought about."""

import email.message
import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parent.parent.parent / "scripts" / "licences.py"
spec = importlib.util.spec_from_file_location("licences", PATH)
licences = importlib.util.module_from_spec(spec)
sys.modules["licences"] = licences
spec.loader.exec_module(licences)


def test_what_serves_is_under_known_licences(capsys):
    """Fails when a new dependency brings another one: look at its conditions, then add it to the table."""
    assert licences.main([]) == 0, capsys.readouterr().out
    report = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{report}" for name in ("openvino", "nvidia-pytriton", "tritonclient", "tokenizers"))


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("MIT", licences.PERMISSIVE),
        ("(MIT OR GPL-3.0-only) AND ISC", licences.UNKNOWN),
        ("MIT OR GPL-3.0-only", licences.PERMISSIVE),
        ("MPL-2.0 AND MIT", licences.FILE_COPYLEFT),
        ("GPL-3.0-only", licences.UNKNOWN),
        ("none stated", licences.UNKNOWN),
    ],
)
def test_with_or_one_may_choose_and_with_and_all_hold(expression, kind):
    """An expression with both is never taken for less strict than it is."""
    assert licences.kind_of(expression) == kind


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ([("License-Expression", "ISC"), ("License", "GPL")], "ISC"),
        ([("License", "Apache 2.0")], "Apache-2.0"),
        ([("Classifier", "License :: OSI Approved :: BSD License")], "BSD-3-Clause"),
        ([("License", "see LICENSE"), ("Classifier", "License :: OSI Approved :: MIT License")], "MIT"),
        ([("License", "Copyright 2020 Somebody\nAll rights")], "Copyright 2020 Somebody"),
        ([("Classifier", "License :: OSI Approved")], "none stated"),
    ],
)
def test_a_licence_is_found_wherever_a_package_states_it(fields, licence):
    metadata = email.message.Message()
    for name, value in fields:
        metadata[name] = value
    assert licences.state("x", "1", metadata).licence == licence

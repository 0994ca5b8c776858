"""Fast and wrong is no acceptance: answers of a quality set are checked, and count among what was issued."""

from dataclasses import replace

import pytest
from slo_support import failing, make_run

from loadtests.answers import is_right
from loadtests.contract_toml import parse_contract
from loadtests.report import build_report
from loadtests.verdict import judge
from loadtests.workload import QualityItem

QUALITY = [
    {"id": "paris", "prompt": "p", "max_tokens": 6, "check": "contains", "expect": ["Paris"]},
    {"id": "json", "prompt": "q", "max_tokens": 6, "check": "json", "expect": ["name"]},
]


def answered(right=True):
    texts = {"paris": " paris, of course" if right else "Rome", "json": '{"name": 1}'}
    return lambda record: replace(record, item=record.item, answer=texts[record.item])


def quality_document(document):
    profile = document["profiles"][0]
    del profile["prompt_tokens"], profile["output_tokens"]
    profile["objectives"] = [{"id": "o", "metric": "quality_ratio", "ge": 0.9}]
    profile |= {"data": {"source": "quality", "seed": 3}, "quality": QUALITY}
    return document


def test_fast_and_wrong_fails(document):
    """Wrong: a service could answer nonsense at a great rate."""
    contract = parse_contract(quality_document(document))

    def result(change):
        return judge(contract, make_run(contract, change)).profiles[0].results[0]

    assert result(answered()).status == "PASS"
    wrong = result(answered(right=False))
    assert wrong.status == "FAIL"
    assert set(wrong.misses) == {"wrong"}
    assert result(lambda r: failing(r) if r.index % 3 == 0 else answered()(r)).status == "FAIL"


def test_the_report_shows_which_prompt_was_answered_wrong(document):
    contract = parse_contract(quality_document(document))
    run = make_run(contract, answered(right=False))
    shown = build_report(contract, run, judge(contract, run))["profiles"][0]["special"]["quality"]
    assert shown["paris"]["right"] == 0
    assert shown["paris"]["wrong_answer"] == "Rome"
    assert shown["json"]["right"] == shown["json"]["asked"] > 0


@pytest.mark.parametrize(
    ("check", "expect", "answer", "right"),
    [
        ("exact", ("yes",), " yes\n", True),
        ("exact", ("yes", "no"), "no", True),
        ("exact", ("yes",), "yes!", False),
        ("contains", ("Paris",), "it is PARIS.", True),
        ("contains", ("Paris",), "it is Rome.", False),
        ("regex", (r"^\d{4}$",), "2024", True),
        ("regex", (r"^\d{4}$",), "20241", False),
        ("json", ("name",), '{"name": "a", "b": 1}', True),
        ("json", ("name",), '{"nam": "a"}', False),
        ("json", (), "[1]", False),
        ("json", (), '{"a": 1', False),
        ("contains", ("x",), "", False),
    ],
)
def test_answers_are_checked(check, expect, answer, right):
    assert is_right(QualityItem("i", "p", 4, check, expect, ()), answer) is right

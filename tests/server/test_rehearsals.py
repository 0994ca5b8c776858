"""Rehearsals of faults: each on the real server; and the runner, which must not call good what it did not see."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from loadtests.rehearsals import REHEARSALS, main, rehearse, table  # noqa: E402
from loadtests.rehearsals_stage import FAIL, NOT_RUN, PASS, NotPossible, Rehearsal, Stage  # noqa: E402
from tritonforge.release import Release, write_manifest  # noqa: E402

SHORT = ("disk-full-at-build", "dependency-hung")
"""What other tests of the server do not see already. TRITONFORGE_TEST_REHEARSALS=all runs every one, in three minutes;
so does loadtests/rehearsals.py."""
CHOSEN = tuple(REHEARSALS) if os.environ.get("TRITONFORGE_TEST_REHEARSALS") == "all" else SHORT


@pytest.mark.server
@pytest.mark.parametrize("name", CHOSEN)
def test_users_see_what_they_must_when(name, release_dir, capsys):
    """Wrong: a fault would hang its users, lie to them, or need a person to end it."""
    outcome = rehearse(REHEARSALS[name], Release.open(release_dir))
    with capsys.disabled():
        print(f"\n{table(outcome)}", end="")
    if outcome.status == NOT_RUN:
        pytest.skip(outcome.reason)
    assert outcome.status == PASS, table(outcome)


@pytest.fixture
def release(tmp_path) -> Release:
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "file").write_text("x")
    return write_manifest(tmp_path / "release", name="x")


def made(run, limit_s: float = 20.0) -> Rehearsal:
    return Rehearsal("made-up", "nothing", {"first": "it is good", "second": "it is good too"}, run, limit_s)


def both(stage: Stage) -> None:
    stage.see("first", True, "good")
    stage.see("second", True, "good")


def test_a_rehearsal_passes_when_everything_was_seen_and_good(release):
    outcome = rehearse(made(both), release)
    assert (outcome.status, [one.id for one in outcome.seen]) == (PASS, ["first", "second"])


def test_what_was_not_seen_is_not_good(release):
    outcome = rehearse(made(lambda stage: stage.see("second", True, "good")), release)
    assert outcome.status == FAIL
    assert [(one.id, one.ok) for one in outcome.seen] == [("first", False), ("second", True)]


def test_a_rehearsal_that_breaks_fails_with_what_it_saw_so_far(release):
    def breaks(stage: Stage) -> None:
        both(stage)
        raise RuntimeError("the server fell over")

    outcome = rehearse(made(breaks), release)
    assert outcome.status == FAIL and "RuntimeError: the server fell over" in outcome.reason


def test_a_rehearsal_that_hangs_is_reported_and_not_waited_for(release):
    over = threading.Event()
    outcome = rehearse(made(lambda stage: over.wait(60), limit_s=0.2), release)
    over.set()
    assert outcome.status == FAIL and "hangs: it was not over after 0.2 s" in outcome.reason


def test_a_machine_that_cannot_stage_a_rehearsal_proves_nothing(release):
    def cannot(stage: Stage) -> None:
        raise NotPossible("needs a spare disk")

    outcome = rehearse(made(cannot), release)
    assert (outcome.status, outcome.reason) == (NOT_RUN, "needs a spare disk")


def test_nothing_is_left_beside_the_release(release):
    rehearse(made(lambda stage: (stage.scratch / "big").write_text("x")), release)
    assert [path.name for path in release.root.parent.iterdir()] == ["release"]


def test_the_document_describes_every_rehearsal_and_every_outcome():
    """Wrong: operators would read about an outcome that nobody checks, or miss one."""
    text = " ".join((ROOT / "docs" / "rehearsals.md").read_text().split())
    for rehearsal in REHEARSALS.values():
        assert f"`{rehearsal.id}`" in text
        for sentence in rehearsal.must_see.values():
            assert " ".join(sentence.split()) in text, sentence


def test_an_unknown_rehearsal_is_a_usage_error(tmp_path, release, capsys):
    assert main(["--release", str(release.root), "earthquake"]) == 2
    assert "rehearsal must be one of model-does-not-load" in capsys.readouterr().err


def test_the_report_holds_what_was_seen(tmp_path, release, monkeypatch, capsys):
    monkeypatch.setitem(REHEARSALS, "made-up", made(both))
    assert main(["--release", str(release.root), "--out", str(tmp_path / "r.json"), "made-up"]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["status"] == PASS and [one["id"] for one in found["rehearsals"][0]["seen"]] == ["first", "second"]
    assert "rehearsals: PASS, 1 of 1 passed" in capsys.readouterr().out

"""A release that changes while it is served: what was tampered with is named, what was only touched is not."""

import os
import shutil
import time

import pytest

from tritonforge.launch import release_watch
from tritonforge.launch.release_watch import ReleaseWatch
from tritonforge.release import write_manifest


@pytest.fixture
def release(tmp_path, monkeypatch):
    monkeypatch.setattr(release_watch, "LOOK_S", 0.0)
    root = tmp_path / "release"
    root.mkdir()
    for name in ("model.bin", "tokenizer.json"):
        (root / name).write_bytes(b"x" * 100)
    return write_manifest(root, name="test")


def look(watch: ReleaseWatch, timeout_s: float = 10.0) -> str | None:
    """What is found, if anything, once the watch has read what it wants to read."""
    watch.look(time.monotonic())
    if watch._reading is not None:
        watch._reading.join(timeout_s)
    found = watch.look(time.monotonic())
    return found[0].text if found else None


def test_a_release_that_stays_as_it_is_costs_no_reading(release):
    watch = ReleaseWatch([release])
    assert look(watch) is None and watch._reading is None


def test_a_changed_byte_is_found_and_its_file_named(release):
    watch = ReleaseWatch([release])
    file = release.root / "model.bin"
    file.write_bytes(b"y" + b"x" * 99)
    os.utime(file, ns=(1, 1))
    assert look(watch) == f"model.bin of {release.root} was changed while it was served"


def test_a_removed_file_is_found(release):
    watch = ReleaseWatch([release])
    (release.root / "tokenizer.json").unlink()
    assert look(watch) == f"tokenizer.json of {release.root} was removed while it was served"


def test_a_file_that_was_only_touched_is_as_good_as_before(release):
    """Wrong: a backup program would end every stream."""
    watch = ReleaseWatch([release])
    os.utime(release.root / "model.bin", ns=(1, 1))
    assert look(watch) is None
    assert look(watch) is None


def test_another_release_in_its_place_is_none_of_our_business(release, tmp_path):
    """Wrong: building a release anew would end the streams of the server that has loaded the one before."""
    watch = ReleaseWatch([release])
    new = tmp_path / "new"
    new.mkdir()
    (new / "model.bin").write_bytes(b"z")
    (new / "tokenizer.json").write_bytes(b"z")
    write_manifest(new, name="test")
    shutil.rmtree(release.root)
    new.rename(release.root)
    assert look(watch) is None


def spoil(release):
    file = release.root / "model.bin"
    file.write_bytes(b"y" + b"x" * 99)
    os.utime(file, ns=(1, 1))


@pytest.mark.parametrize("seen_before", [True, False])
def test_a_change_is_found_although_other_releases_come_meanwhile(release, seen_before):
    """Wrong: weights that change while a canary is loaded would be served for good."""
    watch = ReleaseWatch([release])
    spoil(release)
    if seen_before:
        watch.look(time.monotonic())
    watch.follow([release])
    assert look(watch) == f"model.bin of {release.root} was changed while it was served"


def test_a_change_of_a_release_that_is_not_served_any_more_is_no_reason_to_end_a_stream(release):
    watch = ReleaseWatch([release])
    spoil(release)
    assert look(watch) is not None
    watch.follow([])
    assert look(watch) is None


def test_a_release_that_was_replaced_is_not_held_against_what_came_when_others_come(release):
    """Wrong: a canary after a rebuild would have the watch compare the new files with the old manifest."""
    watch = ReleaseWatch([release])
    (release.root / "model.bin").write_bytes(b"new")
    write_manifest(release.root, name="test")
    assert look(watch) is None
    watch.follow([release])
    os.utime(release.root / "model.bin", ns=(1, 1))
    assert look(watch) is None


def test_a_change_of_one_release_does_not_hide_that_of_another(release, tmp_path):
    """Wrong: while a changed canary is taken back, changed weights of the stable release would go on answering."""
    root = tmp_path / "canary"
    root.mkdir()
    (root / "model.bin").write_bytes(b"x" * 50)
    canary = write_manifest(root, name="canary")
    watch = ReleaseWatch([release, canary])
    (root / "model.bin").write_bytes(b"z")
    assert look(watch) == f"model.bin of {root} was changed while it was served"
    spoil(release)
    look(watch)
    assert {change.release.root for change in watch.look(time.monotonic())} == {release.root, root}

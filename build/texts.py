"""The texts of build/data as token ids: what quality is measured on, and what int4 quantization is calibrated with.

Tokenized with the tokenizer and chat template that the release will serve. Needs no torch.
"""

import json
from pathlib import Path

import checkout
import numpy as np
from tokenizers import Tokenizer

from tritonforge.chat import ChatTemplate
from tritonforge.errors import InvalidCheckpoint, InvalidRequest
from tritonforge.release import content_digest, describe_files

QUALITY = checkout.DATA / "quality"
CALIBRATION = checkout.DATA / "calibration"
MAX_TOKENS = 1024
"""Tokens of each quality text that are measured at most."""
FIXED_DATE = "2025-01-01"
"""The date in chats: a digest must not depend on the day of the build."""
SAMPLE = 256
"""Tokens of one calibration sample."""


def digest(folder: Path) -> str:
    """sha256 (hex) over the names and contents of the texts in `folder`."""
    return content_digest(describe_files(folder))


def quality_windows(tokenizer_dir: Path) -> dict[str, list[int]]:
    """{name: token ids} of the quality texts: each is one sequence, cut at MAX_TOKENS."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    windows = {}
    for path in sorted(QUALITY.iterdir()):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            ids = tokenizer.encode(render_chat(tokenizer_dir, json.loads(text)), add_special_tokens=False).ids
        else:
            ids = tokenizer.encode(text).ids
        windows[path.stem] = ids[:MAX_TOKENS]
    return windows


def calibration_samples(tokenizer_dir: Path) -> list[list[int]]:
    """Token ids of the calibration texts: the chats one by one, the other texts in pieces of SAMPLE tokens."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    samples = []
    for path in sorted(CALIBRATION.iterdir()):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            chats = [render_chat(tokenizer_dir, chat) for chat in json.loads(text)]
            samples += [tokenizer.encode(chat, add_special_tokens=False).ids[:SAMPLE] for chat in chats]
        else:
            ids = tokenizer.encode(text).ids
            samples += [ids[begin : begin + SAMPLE] for begin in range(0, len(ids), SAMPLE)]
    return [sample for sample in samples if len(sample) > 1]


def render_chat(tokenizer_dir: Path, messages: list[dict[str, str]]) -> str:
    """A chat as the model's own template spells it, or one `role: content` line a message where it has no template."""
    template = ChatTemplate.read(tokenizer_dir, strftime=lambda _form: FIXED_DATE)
    if template is None:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    try:
        return template.render(messages, add_generation_prompt=False)
    except InvalidRequest as error:
        raise InvalidCheckpoint(f"chat_template.jinja cannot render a plain chat: {error}") from None


def flatten(windows: dict[str, list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All token ids in one int32 array, and the offsets [windows + 1] at which each window begins."""
    begins = np.cumsum([0] + [len(ids) for ids in windows.values()])
    return np.concatenate([np.asarray(ids, np.int32) for ids in windows.values()]), begins.astype(np.int64)

"""The served decoder: what its Triton model loads, verifies and runs. It knows no Triton type.

decoder.json of the release says which engine and which limits; see DecoderConfig.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonforge.blocks import BlockManager
from tritonforge.engines.base import Engine
from tritonforge.errors import NotFound, ReleaseMismatch
from tritonforge.loop import EngineLoop
from tritonforge.request import Limits
from tritonforge.scheduler import Scheduler, SchedulerConfig
from tritonforge.text import Tokenizer


@dataclass(frozen=True)
class DecoderConfig:
    """The content of decoder.json: engine name and its configuration, scheduler limits, end tokens."""

    engine: str
    engine_config: dict[str, Any]
    scheduler: SchedulerConfig
    stop_token_ids: frozenset[int]

    @classmethod
    def read(cls, path: Path) -> "DecoderConfig":
        """Raises NotFound when there is no file, ReleaseMismatch when it lacks a key or has an unknown one."""
        if not path.is_file():
            raise NotFound(f"decoder configuration {path} does not exist")
        values = json.loads(path.read_text(encoding="utf-8"))
        if set(values) != set(cls.__dataclass_fields__):
            raise ReleaseMismatch(
                f"{path.name} must have the keys {sorted(cls.__dataclass_fields__)}, got {sorted(values)}"
            )
        return cls(
            engine=values["engine"],
            engine_config=values["engine_config"],
            scheduler=SchedulerConfig(**values["scheduler"]),
            stop_token_ids=frozenset(values["stop_token_ids"]),
        )


def load_engine(name: str, folder: Path, config: dict[str, Any]) -> Engine:
    """The engine `name` with the files of `folder`. Imports only what that engine needs."""
    if name == "openvino":
        from tritonforge.engines.openvino import OpenVINOEngine

        return OpenVINOEngine(folder, config)
    raise ReleaseMismatch(f"engine must be one of openvino, got {name!r}")


class Decoder:
    """A loaded decoder: engine, tokenizer and the running loop."""

    def __init__(self, folder: Path, *, on_death: Callable[[], None] = lambda: None) -> None:
        """Load from `folder`, the version folder of the decoder in a release that was verified."""
        config = DecoderConfig.read(folder / "decoder.json")
        self.tokenizer = Tokenizer(folder)
        engine = load_engine(config.engine, folder / "engine", config.engine_config)
        self.limits = Limits(engine.spec.max_model_len, engine.spec.vocab_size)
        blocks = BlockManager(engine.spec.num_blocks, engine.spec.block_size)
        self.loop = EngineLoop(
            engine,
            Scheduler(config.scheduler, blocks),
            self.tokenizer.decode,
            config.stop_token_ids,
            on_death=on_death,
        )
        self.loop.start()

"""The served decoder: what its Triton model loads, verifies and runs. It knows no Triton type.

decoder.json of the release says which engine and which limits; see DecoderConfig.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tritonforge.engines.base import Engine, EngineSpec
from tritonforge.errors import NotFound, ReleaseMismatch
from tritonforge.generate_request import GenerateRequest, Limits
from tritonforge.generation import Delta, Generation, Sink
from tritonforge.loop import EngineLoop
from tritonforge.messages import parse_tools
from tritonforge.scheduling.blocks import BlockManager
from tritonforge.scheduling.request import FinishReason
from tritonforge.scheduling.scheduler import Scheduler
from tritonforge.scheduling.scheduler_config import SchedulerConfig
from tritonforge.scheduling.speculation import Speculation, StepCost
from tritonforge.structured.constraints import Grammars
from tritonforge.structured.tool_calls import ToolCallFormat, detect_format, parse
from tritonforge.text import Decode, Tokenizer

LINEAR_COST = StepCost(fixed=0.93, per_sequence=0.07, per_draft=0.9, per_draft_token=0.05, per_change=0.0)
"""What drafts cost on a linear KV cache: beside decodes of one token they take a call of their own, which costs almost
what the whole step of one sequence does. Another number of rows costs nothing there."""


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
    if name == "onnxruntime":
        from tritonforge.engines.onnxruntime import OnnxRuntimeEngine

        return OnnxRuntimeEngine(folder, config)
    if name == "tensorrt":
        from tritonforge.engines.tensorrt import TensorRTEngine

        return TensorRTEngine(folder, config)
    raise ReleaseMismatch(f"engine must be one of openvino, onnxruntime, tensorrt, got {name!r}")


def load_blocks(spec: EngineSpec) -> BlockManager:
    """The block manager of an engine's KV cache, linear when a block is as long as the context."""
    return BlockManager(spec.num_blocks, spec.block_size, linear=spec.block_size == spec.max_model_len)


def load_loop(
    config: DecoderConfig, folder: Path, decode: Decode, *, on_death: Callable[[], None] = lambda: None
) -> EngineLoop:
    """The engine loop of `config`, not started yet, with the engine files of the decoder's version folder."""
    engine = load_engine(config.engine, folder / "engine", config.engine_config)
    blocks = load_blocks(engine.spec)
    speculation = Speculation(lambda: scheduler.num_running, LINEAR_COST if blocks.linear else None)
    scheduler = Scheduler(config.scheduler, blocks, speculation.propose)
    return EngineLoop(engine, scheduler, decode, config.stop_token_ids, forget=speculation.forget, on_death=on_death)


class Decoder:
    """A loaded decoder: engine, tokenizer and the running loop."""

    def __init__(self, folder: Path, *, on_death: Callable[[], None] = lambda: None) -> None:
        """Load from `folder`, the version folder of the decoder in a release that was verified."""
        config = DecoderConfig.read(folder / "decoder.json")
        self.tokenizer = Tokenizer(folder)
        self.loop = load_loop(config, folder, self.tokenizer.decode, on_death=on_death)
        spec = self.loop.engine_spec
        self.limits = Limits(spec.max_model_len, spec.vocab_size)
        self._grammars = Grammars(folder / "tokenizer.json", spec.vocab_size, config.stop_token_ids)
        self._tool_call_format = detect_format(self.tokenizer.tool_template)
        self.loop.start()

    def submit(
        self,
        prompt_ids: Sequence[int],
        options: Mapping[str, Any],
        sink: Sink,
        *,
        request_id: str = "",
        truncated_tokens: int = 0,
    ) -> int:
        """Check a request, compile what it needs and hand it to the loop; returns its key there.

        Raises InvalidRequest naming field, value and rule, Overloaded when the loop takes no more work.
        """
        asked = GenerateRequest.from_wire(
            prompt_ids,
            options,
            self.limits,
            request_id,
            encode=self.tokenizer.encode_plain,
            truncated_tokens=truncated_tokens,
        )
        grammar = None if asked.structure is None else self._grammars.compile(*asked.structure)
        if asked.tools is not None and self._tool_call_format is not None:
            names = [tool["function"]["name"] for tool in parse_tools(asked.tools)]
            sink = ToolCallSink(sink, self._tool_call_format, names)
        return self.loop.submit(asked, sink, grammar)


class ToolCallSink:
    """A Sink that adds to the end of each answer the tool calls that are in its text."""

    def __init__(self, sink: Sink, form: ToolCallFormat, offered: Sequence[str]) -> None:
        self._sink = sink
        self._form = form
        self._offered = offered
        self._texts: defaultdict[int, str] = defaultdict(str)

    def __call__(self, generation: Generation, delta: Delta) -> None:
        """Pass `delta` on; called by the loop's thread."""
        self._texts[delta.index] += delta.text
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            calls = parse(self._form, self._texts[delta.index], self._offered).tool_calls
            delta = replace(delta, tool_calls=calls)
        self._sink(generation, delta)

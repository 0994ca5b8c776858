"""What the golden tests serve with: a float32 model, its OpenVINO engine, and requests through the real engine loop."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig

from tritonforge.engines.openvino import BLOCK_SIZE, OpenVINOEngine
from tritonforge.loop import EngineLoop
from tritonforge.sampling.sampling import Drawn
from tritonforge.scheduling.blocks import BlockManager
from tritonforge.scheduling.request import FinishReason
from tritonforge.scheduling.scheduler import Scheduler
from tritonforge.scheduling.scheduler_config import SchedulerConfig
from tritonforge.scheduling.speculation import Speculation

NUM_BLOCKS = 96
MAX_MODEL_LEN = 1024
WAIT_S = 300.0


@dataclass(frozen=True)
class Case:
    """A float32 torch model, and the folder of its OpenVINO export."""

    model: torch.nn.Module
    folder: Path
    stop_token_ids: frozenset[int]
    tolerance: float

    def open_engine(self, kv_cache_precision: str = "f32") -> OpenVINOEngine:
        """Two compiled models over one KV cache, as in a release; a bf16 cache goes with bf16 activations only."""
        properties = {"INFERENCE_PRECISION_HINT": "bf16" if kv_cache_precision == "bf16" else "f32"}
        config = {
            "max_model_len": MAX_MODEL_LEN,
            "block_size": BLOCK_SIZE,
            "num_blocks": NUM_BLOCKS,
            "vocab_size": self.model.config.vocab_size,
            "kv_cache_precision": kv_cache_precision,
            "properties": properties,
            "prefill_properties": properties,
        }
        return OpenVINOEngine(self.folder, config)

    def logits(self, token_ids) -> np.ndarray:
        """transformers' logits [len(token_ids), vocab_size] for all positions at once."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(token_ids)])).logits[0].float().numpy()

    def logprobs(self, token_ids) -> np.ndarray:
        """log_softmax of `logits`, in float64."""
        return torch.log_softmax(torch.from_numpy(self.logits(token_ids)).double(), -1).numpy()

    def generate(self, prompt_ids, max_tokens: int) -> list[int]:
        """transformers' greedy answer, with its end token."""
        config = GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens, eos_token_id=sorted(self.stop_token_ids), pad_token_id=0
        )
        prompt = torch.tensor([list(prompt_ids)])
        with torch.inference_mode():
            answer = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
        return answer[0, prompt.shape[1] :].tolist()


class SharedEngine:
    """Passes everything on, outlives the loops that close it, and counts the blocks they had copied."""

    def __init__(self, engine: OpenVINOEngine) -> None:
        self.spec = engine.spec
        self.step = engine.step
        self.num_copies = 0
        self._engine = engine

    def copy_blocks(self, copies) -> None:
        self.num_copies += len(copies)
        self._engine.copy_blocks(copies)

    def close(self) -> None:
        pass


@dataclass
class Served:
    """What a request was answered: drawn tokens and finish reason by answer, and log-probabilities of its prompt."""

    drawn: dict[int, list[Drawn]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    prompt_logprobs: tuple[Drawn, ...] | None = None

    def token_ids(self, index: int = 0) -> list[int]:
        """The tokens of one answer."""
        return [one.token_id for one in self.drawn[index]]


def serve(
    case: Case,
    engine: SharedEngine,
    asked,
    *,
    num_blocks=NUM_BLOCKS,
    budget=256,
    cost=None,
    propose=None,
    one_by_one=False,
) -> tuple[list[Served], Scheduler]:
    """Answer `asked` by a loop of their own, all at once or `one_by_one`; no block may be held afterwards."""
    speculation = Speculation(lambda: scheduler.num_running, cost)
    config = SchedulerConfig(8, budget, 64, 1 << 20)
    propose = propose if cost is None else speculation.propose
    scheduler = Scheduler(config, BlockManager(num_blocks, BLOCK_SIZE), propose)
    loop = EngineLoop(engine, scheduler, lambda ids: "x" * len(ids), case.stop_token_ids, forget=speculation.forget)
    answers = [Served() for _ in asked]
    done = threading.Semaphore(0)

    def sink(answer):
        def take(_, delta):
            assert delta.error is None, delta.error
            answer.drawn.setdefault(delta.index, []).extend(delta.drawn)
            if delta.finish_reason:
                answer.reasons[delta.index] = delta.finish_reason
            if delta.prompt is not None:
                answer.prompt_logprobs = delta.prompt.logprobs
            if delta.final:
                done.release()

        return take

    for index, request in enumerate(asked):
        loop.submit(request, sink(answers[index]))
        if index == (0 if one_by_one else len(asked) - 1):
            loop.start()
        assert not one_by_one or done.acquire(timeout=WAIT_S)
    assert one_by_one or all(done.acquire(timeout=WAIT_S) for _ in asked)
    assert loop.drain(WAIT_S)
    scheduler.check_invariants()
    assert scheduler.blocks.num_free == num_blocks
    return answers, scheduler

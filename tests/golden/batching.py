"""Asks a real engine for many answers at once, and for each alone, and measures where they part.

Kernels add in another order for another batch, and a u8 KV block is quantized again as it fills, so logits move.
The first different token of a batched answer must be one that the lone run rated almost as high as its own choice.
"""

import random
import threading
from pathlib import Path

import numpy as np

from tritonforge.decoder import DecoderConfig, load_blocks, load_engine
from tritonforge.generate_request import GenerateRequest
from tritonforge.loop import EngineLoop
from tritonforge.scheduling.scheduler import Scheduler
from tritonforge.scheduling.scheduler_config import SchedulerConfig

WAIT_S = 300.0


class RecordingEngine:
    """Passes steps on and keeps the logits of every step that samples one row: those of a request that runs alone."""

    def __init__(self, engine):
        self.spec = engine.spec
        self._engine = engine
        self.lone_logits = []

    def step(self, sequences):
        logits = self._engine.step(sequences)
        if len(sequences) == 1 and sequences[0].num_logits == 1:
            self.lone_logits.append(logits[0].copy())
        return logits

    def copy_blocks(self, copies):
        self._engine.copy_blocks(copies)

    def close(self):
        pass


def answer_all(engine, decode, asked, *, together):
    """Output token ids of each request, all submitted at once or one after the other, without prefix reuse between."""
    config = SchedulerConfig(32, 256, 64, 1 << 20)
    scheduler = Scheduler(config, load_blocks(engine.spec))
    loop = EngineLoop(engine, scheduler, decode)
    done = threading.Semaphore(0)
    answers = [[] for _ in asked]

    def sink(index):
        def take(generation, delta):
            answers[index].extend(delta.token_ids)
            if delta.final:
                assert delta.error is None
                done.release()

        return take

    loop.start()
    try:
        for index, request in enumerate(asked):
            loop.submit(request, sink(index))
            if not together:
                assert done.acquire(timeout=WAIT_S)
        for _ in asked if together else ():
            assert done.acquire(timeout=WAIT_S)
    finally:
        loop.drain(0)
    return answers


def gaps_where_answers_part(release_dir: Path, count: int, *, most_tokens: int) -> list[float]:
    """Of `count` requests, for each answer that differs when batched: by how much the lone run rated its first other
    token lower. Prompts have 5 to 700 tokens, answers 1 to `most_tokens`."""
    folder = release_dir / "model_repository" / "decoder" / "1"
    config = DecoderConfig.read(folder / "decoder.json")
    engine = RecordingEngine(load_engine(config.engine, folder / "engine", config.engine_config))
    rng = random.Random(3)
    asked = [
        GenerateRequest(
            tuple(rng.randrange(100, 40000) for _ in range(rng.randint(5, 700))), rng.randint(1, most_tokens)
        )
        for _ in range(count)
    ]

    def decode(token_ids):
        return "x" * len(token_ids)

    batched = answer_all(engine, decode, asked, together=True)
    engine.lone_logits.clear()
    alone, gaps = [], []
    for index, request in enumerate(asked):
        alone += answer_all(engine, decode, [request], together=False)
        rows, engine.lone_logits = engine.lone_logits, []
        assert len(rows) == len(alone[index]) == len(batched[index]) == request.max_tokens
        differing = [i for i, (a, b) in enumerate(zip(alone[index], batched[index], strict=True)) if a != b]
        if differing:
            row = rows[differing[0]]
            gaps.append(float(row.max() - row[batched[index][differing[0]]]))
    print(f"{len(gaps)} of {len(asked)} answers differ; gaps at the first difference: {np.round(sorted(gaps), 4)}")
    return gaps

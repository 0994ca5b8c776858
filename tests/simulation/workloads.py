"""Random workloads for the scheduler, each a pure function of its seed; workload_run.py runs them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tritonforge.scheduling.scheduler import SchedulerConfig

VOCAB = 8
STOP_TOKEN = 3


@dataclass(frozen=True)
class Job:
    """One request, or `samples` of them, of a workload; `cancel_at` is a step (None: never)."""

    prompt: tuple[int, ...]
    max_tokens: int
    arrives_at: int
    cancel_at: int | None
    stops: frozenset[int]
    samples: int
    priority: int
    tenant: str
    salt: str
    reuse_prefix: bool
    max_chunk: int | None


@dataclass(frozen=True)
class Workload:
    """Jobs, the limits that they meet, and how the drafts and the engine misbehave: shares in [0, 1]."""

    seed: int
    jobs: tuple[Job, ...]
    config: SchedulerConfig
    block_size: int
    num_blocks: int
    speculates: bool
    draft_quality: float
    failing_steps: float
    failing_rows: float
    linear: bool = False

    @classmethod
    def random(cls, seed: int) -> "Workload":
        """The workload of `seed`: small enough to run in milliseconds, tight enough to reach every rule."""
        rng = random.Random(seed)
        block_size = rng.choice((1, 2, 4, 4, 8))
        stems = [tuple(rng.choices(range(VOCAB), k=rng.randrange(1, 17))) for _ in range(rng.randrange(1, 4))]
        tenants = rng.choice((("",), ("", "a"), ("a", "b", "c")))
        calm = rng.random() < 0.5
        jobs = [_job(rng, stems, tenants, calm) for _ in range(rng.randrange(1, 14))]
        longest = max(len(job.prompt) + job.max_tokens for job in jobs)
        least = -(-longest // block_size)
        seats = rng.randrange(1, 9)
        return cls(
            seed=seed,
            jobs=tuple(jobs),
            config=SchedulerConfig(
                max_num_seqs=seats,
                max_num_batched_tokens=max(seats, rng.choice((1, 4, 8, 16, 40))),
                max_waiting=rng.choice((1, 2, 4, 64)),
                max_waiting_tokens=rng.choice((24, 64, 4096)),
                ageing_ms=rng.choice((1, 8, 1000)),
                watermark=rng.choice((0.0, 0.01, 0.2)),
            ),
            block_size=block_size,
            num_blocks=least - (rng.random() < 0.05) + rng.choice((0, 0, 1, least // 2, least, 8 * least)) or 1,
            speculates=rng.random() < 0.5,
            draft_quality=rng.choice((0.0, 0.5, 0.9, 1.0)),
            failing_steps=rng.choice((0.0, 0.0, 0.0, 0.03)),
            failing_rows=rng.choice((0.0, 0.0, 0.0, 0.02)),
        )

    @classmethod
    def random_linear(cls, seed: int) -> "Workload":
        """The same jobs on a linear KV cache: each sequence has a slot as long as the longest, rarely one too short."""
        paged = cls.random(seed)
        rng = random.Random(f"linear {seed}")
        longest = max(len(job.prompt) + job.max_tokens for job in paged.jobs)
        seats = paged.config.max_num_seqs
        return replace(
            paged,
            block_size=max(1, longest - (rng.random() < 0.05)),
            num_blocks=rng.choice((1, 2, seats, seats + 1, 2 * seats)),
            linear=True,
        )


def _job(rng: random.Random, stems: Sequence[tuple[int, ...]], tenants: Sequence[str], calm: bool) -> Job:
    prompt = (*rng.choice(stems), *rng.choices(range(VOCAB), k=rng.randrange(0, 9)))
    arrives_at = rng.randrange(0, 14)
    unshared = rng.random() < 0.1
    return Job(
        prompt=prompt,
        max_tokens=rng.randrange(1, 13),
        arrives_at=arrives_at,
        cancel_at=None if rng.random() < 0.8 else arrives_at + rng.randrange(0, 14),
        stops=frozenset({STOP_TOKEN}) if rng.random() < 0.4 else frozenset(),
        samples=1 if rng.random() < 0.75 else rng.randrange(2, 5),
        priority=5 if calm else rng.randrange(10),
        tenant=rng.choices(tenants, weights=(8, 2, 1)[: len(tenants)])[0],
        salt=rng.choice(("", "", "", "pepper")),
        reuse_prefix=not unshared,
        max_chunk=rng.randrange(1, 6) if unshared else None,
    )

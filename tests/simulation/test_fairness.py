"""What tenants, urgent requests and a small pool cost, in the milliseconds of a step-cost model.

The bounds for a tenant within its share, whose prompts fit a step. Once both tenants are known a flood runs in short
steps: it makes the 95th percentile of the other's time to first token no more than one and a half times as long. While
they meet for the first time a request may wait for a full step that is running, and for another tenant's turn: no more
than one and a half full steps beyond the time without the flood.
"""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from timed import BLOCK_SIZE, Arrival, StepCost, Timings, play

from tritonforge.scheduling.scheduler import SchedulerConfig

COST = StepCost()
NUM_BLOCKS = 1226
BUDGET = 512
SEATS = 16
MET_MS = 2000
"""By then both tenants have asked for something, at the rates below."""


def poisson(tenant: str, rate_per_s: float, seconds: float, prompt: tuple[int, int], seed: int) -> list[Arrival]:
    """Requests of `tenant` at random times, with prompts of random tokens and outputs of 16 to 63 tokens."""
    rng = random.Random(seed)
    arrivals, at_ms = [], 0.0
    while (at_ms := at_ms + rng.expovariate(rate_per_s) * 1000) < seconds * 1000:
        tokens = tuple(rng.randrange(1000) for _ in range(rng.randrange(*prompt)))
        arrivals.append(Arrival(at_ms, tenant, tokens, rng.randrange(16, 64)))
    return arrivals


def limits(**changes) -> SchedulerConfig:
    fields = {"max_num_seqs": SEATS, "max_num_batched_tokens": BUDGET, "max_waiting": 64, "max_waiting_tokens": 65536}
    return SchedulerConfig(**fields | changes)


@pytest.mark.parametrize(
    ("rate_per_s", "prompt", "flood_prompt"),
    [
        (0.5, (64, 256), (64, 256)),
        (0.5, (64, 256), (800, 1200)),
        (0.5, (200, 400), (64, 256)),
        (0.5, (200, 400), (800, 1200)),
        (1.0, (64, 256), (64, 256)),
        (1.0, (400, 512), (64, 256)),
    ],
)
def test_a_flood_of_50_times_the_load_hardly_delays_another_tenant(rate_per_s, prompt, flood_prompt):
    light = poisson("light", rate_per_s, 200, prompt, seed=1)
    flood = poisson("flood", 50 * rate_per_s, 200, flood_prompt, seed=2)
    alone = play(light, limits(), NUM_BLOCKS, COST)
    flooded = play(light + flood, limits(), NUM_BLOCKS, COST)
    assert not [one for one in flooded.shed if one.tenant == "light"], "the flood pushed out another tenant's requests"
    assert len(flooded.shed) > len(flood) / 2, "this is no flood"
    assert flooded.p95_ttft_ms("light") <= alone.p95_ttft_ms("light") + 1.5 * COST.ms(BUDGET), "while they meet"
    alone_ms, flooded_ms = (timings.p95_ttft_ms("light", after_ms=MET_MS) for timings in (alone, flooded))
    print(f"p95 TTFT alone {alone_ms:.0f} ms, flooded {flooded_ms:.0f} ms: {flooded_ms / alone_ms:.2f} times")
    assert flooded_ms <= 1.5 * alone_ms


def test_a_flood_still_gets_the_rest_of_the_capacity():
    light = poisson("light", 1.0, 60, (64, 256), seed=1)
    flood = poisson("flood", 50.0, 60, (64, 256), seed=2)
    both, alone = (play(load, limits(), NUM_BLOCKS, COST) for load in (light + flood, flood))
    assert rate(both) >= 0.9 * rate(alone)


def test_two_floods_get_equal_parts():
    floods = poisson("a", 20.0, 60, (64, 256), seed=1) + poisson("b", 60.0, 60, (64, 256), seed=2)
    ended = [one.tenant for one in play(floods, limits(), NUM_BLOCKS, COST).ended_ms]
    assert ended.count("a") == pytest.approx(ended.count("b"), rel=0.1)


def test_urgent_requests_wait_less_and_the_least_urgent_are_served_all_the_same():
    rng = random.Random(4)
    load = [
        Arrival(one.at_ms, "", one.prompt, one.max_tokens, rng.choice((0, 5, 9)))
        for one in poisson("", 9.0, 60, (64, 256), seed=3)
    ]
    timings = play(load, limits(max_waiting=10_000, max_waiting_tokens=1 << 24), NUM_BLOCKS, COST)
    assert len(timings.ended_ms) == len(load)
    means = [mean_ttft(timings, priority) for priority in (0, 5, 9)]
    assert means == sorted(means) and means[2] > 2 * means[0]
    oldest = max(timings.ttft_ms.values())
    assert oldest <= means[1] + 2 * 9 * 2000, "ageing bounds how long the least urgent are overtaken"


@pytest.mark.parametrize(("outputs", "prompt"), [((64, 192), (64, 256)), ((256, 512), (200, 400))])
def test_a_pool_of_half_the_need_completes_all_at_60_percent_of_the_rate(outputs, prompt):
    rng = random.Random(3)
    load = [
        Arrival(
            i * 5.0,
            rng.choice("ab"),
            tuple(rng.choices(range(1000), k=rng.randrange(*prompt))),
            rng.randrange(*outputs),
        )
        for i in range(150)
    ]
    config = limits(max_num_seqs=32, max_waiting=1000, max_waiting_tokens=1 << 20)
    need = 32 * (sum(prompt) + sum(outputs)) // 2 // BLOCK_SIZE
    ample, small = play(load, config, NUM_BLOCKS, COST), play(load, config, need // 2, COST)
    print(f"{need // 2} blocks: {rate(small) / rate(ample):.2f} of the rate, {small.preemptions} preemptions")
    assert len(small.ended_ms) == len(load) and small.preemptions > 0
    assert rate(small) >= 0.6 * rate(ample)


def rate(timings: Timings) -> float:
    """Output tokens per millisecond."""
    return timings.output_tokens / timings.now_ms


def mean_ttft(timings: Timings, priority: int) -> float:
    """Mean time to first token of a class, in ms."""
    times = [ms for one, ms in timings.ttft_ms.items() if one.priority == priority]
    return sum(times) / len(times)

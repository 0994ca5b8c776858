"""The scheduler on a clock: a step costs so much and so much more a token, and requests arrive at their times.

No engine: the tokens do not matter here, only when they come.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from tritonforge.errors import Overloaded
from tritonforge.scheduling.blocks import BlockManager
from tritonforge.scheduling.request import FinishReason, Request
from tritonforge.scheduling.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE = 32


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a step; the defaults are those of a 135M decoder on two CPU cores."""

    step_ms: float = 20.0
    token_ms: float = 0.3

    def ms(self, num_tokens: int) -> float:
        """What a step of `num_tokens` takes."""
        return self.step_ms + self.token_ms * num_tokens


@dataclass(frozen=True)
class Arrival:
    """A request that arrives at `at_ms`."""

    at_ms: float
    tenant: str
    prompt: Sequence[int]
    max_tokens: int
    priority: int = 5


@dataclass
class Timings:
    """What happened: times to first token and ends in ms, by arrival; who was refused or pushed out."""

    ttft_ms: dict[Arrival, float] = field(default_factory=dict)
    ended_ms: dict[Arrival, float] = field(default_factory=dict)
    shed: list[Arrival] = field(default_factory=list)
    output_tokens: int = 0
    now_ms: float = 0.0
    preemptions: int = 0

    def p95_ttft_ms(self, tenant: str, after_ms: float = 0.0) -> float:
        """The 95th percentile of a tenant's times to first token, of requests that arrived after `after_ms`."""
        return quantiles(
            [ms for one, ms in self.ttft_ms.items() if one.tenant == tenant and one.at_ms > after_ms], n=20
        )[18]


def play(arrivals: Sequence[Arrival], config: SchedulerConfig, num_blocks: int, cost: StepCost) -> Timings:
    """Run `arrivals` to the end; what comes during a step is added when it ends, as in the engine loop."""
    scheduler = Scheduler(config, BlockManager(num_blocks, BLOCK_SIZE))
    timings = Timings()
    asked: dict[Request, Arrival] = {}
    coming = sorted(arrivals, key=lambda one: one.at_ms, reverse=True)
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            timings.now_ms = max(timings.now_ms, coming[-1].at_ms)
        while coming and coming[-1].at_ms <= timings.now_ms:
            one = coming.pop()
            request = Request(
                len(asked),
                one.prompt,
                one.max_tokens,
                priority=one.priority,
                tenant=one.tenant,
                arrival_ns=int(one.at_ms * 1e6),
            )
            asked[request] = one
            try:
                timings.shed += [asked[victim] for victim in scheduler.add(request)]
            except Overloaded:
                timings.shed.append(one)
        plan = scheduler.schedule()
        timings.now_ms += cost.ms(plan.num_tokens)
        for event in scheduler.commit(plan, [(0,) for work in plan.work if work.samples]):
            one = asked[event.request]
            timings.output_tokens += 1
            timings.ttft_ms.setdefault(one, timings.now_ms - one.at_ms)
            if event.finish_reason is FinishReason.LENGTH:
                timings.ended_ms[one] = timings.now_ms
    timings.preemptions = scheduler.num_preemptions
    return timings

"""The running batch, and the step that is being planned for it. Pure; the Scheduler is the only caller.

The batch is kept in queue order, so its last request is the newest: the one that is preempted first.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from tritonforge.request import Request, StepPlan, Work

_order = attrgetter("order")


class RunningBatch:
    """The running requests in queue order, and the seats that each tenant holds."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.seats: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Oldest first; the batch may change meanwhile."""
        return iter(tuple(self._requests))

    @property
    def newest(self) -> Request:
        """The request that is last in queue order."""
        return self._requests[-1]

    def newest_of(self, tenant: str) -> Iterator[Request]:
        """The requests of `tenant`, newest first."""
        return (request for request in reversed(self._requests) if request.tenant == tenant)

    def add(self, request: Request) -> None:
        """Give `request` a seat."""
        insort(self._requests, request, key=_order)
        self.seats[request.tenant] = self.seats.get(request.tenant, 0) + 1

    def remove(self, request: Request) -> None:
        """Take the seat of `request` away."""
        position = bisect_left(self._requests, request.order, key=_order)
        assert self._requests[position] is request, "a request that does not run was taken out of the batch"
        del self._requests[position]
        self.seats[request.tenant] -= 1
        if not self.seats[request.tenant]:
            del self.seats[request.tenant]

    def check_invariants(self) -> None:
        """Assert that the order and the seats are those of the requests."""
        orders = [request.order for request in self._requests]
        assert all(first < second for first, second in pairwise(orders))
        tenants = [request.tenant for request in self._requests]
        assert self.seats == {tenant: tenants.count(tenant) for tenant in tenants}


class Prefill(NamedTuple):
    """What a request wants from this step: tokens; and the blocks it lacks to its last token."""

    num_tokens: int
    num_blocks: int


class Step:
    """A step while it is planned: the token budget left, the work given out, and the prefills that still want some.

    A request is in `work` or in `prefills`, never in both; one that is preempted leaves either.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.work: dict[Request, Work] = {}
        self.copies: dict[Request, tuple[int, int]] = {}
        self.preempted: list[Request] = []
        self.prefills: dict[Request, Prefill] = {}
        self.demand: dict[str, int] = {}
        self.num_promised_blocks = 0

    def give(self, work: Work) -> None:
        """Give out work and spend its tokens."""
        self._drop_prefill(work.request)
        self.work[work.request] = work
        self.budget -= work.num_new_tokens

    def ask(self, request: Request, num_missing_blocks: int) -> None:
        """Note that `request` wants a prefill chunk, and how many blocks it lacks to its last token."""
        wanted = request.num_tokens - request.num_computed_tokens
        if request.max_chunk is not None:
            wanted = min(wanted, request.max_chunk)
        self.prefills[request] = Prefill(wanted, num_missing_blocks)
        self.demand[request.tenant] = self.demand.get(request.tenant, 0) + wanted
        self.num_promised_blocks += num_missing_blocks

    def preempt(self, request: Request) -> None:
        """Take back what this step gave to `request`, or promised it."""
        self.preempted.append(request)
        self.copies.pop(request, None)
        self._drop_prefill(request)
        work = self.work.pop(request, None)
        if work is not None:
            self.budget += work.num_new_tokens

    def _drop_prefill(self, request: Request) -> None:
        prefill = self.prefills.pop(request, None)
        if prefill is not None:
            self.demand[request.tenant] -= prefill.num_tokens
            if not self.demand[request.tenant]:
                del self.demand[request.tenant]
            self.num_promised_blocks -= prefill.num_blocks

    def plan(self) -> StepPlan:
        """The finished plan."""
        return StepPlan(tuple(self.work.values()), tuple(self.preempted), tuple(self.copies.values()))


SLACK_STEPS = 4
"""Tenants whose prefills differ by no more than so many full steps are even."""


class PrefillTurns:
    """Whose turn it is among tenants that prefill at the same time: of those that are even, who asks for least.

    Who computed more since they met, by more than a slack, comes after the others until they caught up. The first one's
    prompts go first, so a prompt that fits the step is computed at once. Of the others, who cannot finish in this step
    does not fill more than half of it: short prompts come out of short steps. Everybody gets a token of each step, so
    the oldest request always progresses.
    """

    def __init__(self) -> None:
        self._computed: dict[str, int] = {}
        self._tenants: set[str] = set()

    def shares(self, demand: Mapping[str, int], budget: int) -> dict[str, int]:
        """The prefill tokens of each tenant in this step: at least 1, so `budget` must be at least len(demand)."""
        self._meet(demand)
        even = min((self._computed[tenant] for tenant in demand), default=0) + SLACK_STEPS * budget
        turns = sorted(demand, key=lambda tenant: (self._computed[tenant] > even, demand[tenant]))
        shares: dict[str, int] = {}
        half = budget // 2
        for position, tenant in enumerate(turns, 1):
            room = budget - (len(turns) - position)
            if position > 1 and demand[tenant] > room:
                room = max(1, room - half)
            shares[tenant] = min(demand[tenant], room)
            budget -= shares[tenant]
        return shares

    def charge(self, tenant: str, tokens: int) -> None:
        """Note what `tenant` computed of its share."""
        self._computed[tenant] += tokens

    def _meet(self, demand: Mapping[str, int]) -> None:
        """Lift who comes to the least of those who stay, and forget whoever would be lifted anyway."""
        least = min((self._computed[tenant] for tenant in demand if tenant in self._tenants), default=None)
        self._tenants = set(demand)
        if least is None:
            self._computed = dict.fromkeys(demand, 0)
        else:
            kept = {tenant: tokens for tenant, tokens in self._computed.items() if tokens > least}
            self._computed = dict.fromkeys(demand, least) | kept

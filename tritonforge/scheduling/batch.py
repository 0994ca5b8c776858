"""The running batch, and the step that is being planned for it. Pure; the Scheduler is the only caller.

The batch is kept in queue order, so its last request is the newest: the one that is preempted first.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from tritonforge.scheduling.request import Request, StepPlan, Work

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
    def oldest(self) -> Request:
        """The request that is first in queue order."""
        return self._requests[0]

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

    def defer(self, decodes: Iterable[Request]) -> list[Request]:
        """Take back the token that each of `decodes` was given, and return those that had one."""
        deferred = [request for request in decodes if request in self.work]
        for request in deferred:
            self.budget += self.work.pop(request).num_new_tokens
        return deferred

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

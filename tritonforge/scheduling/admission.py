"""WaitingQueue: who is admitted next, who is refused, who is pushed out. Pure; the Scheduler is the only caller.

Order. Each request has one place among all, fixed when it arrives: a request of class p counts as if it had arrived
p * ageing later. The class whose oldest request has the first place goes next. Inside a class tenants with less than an
equal share of the running requests go first, and of these the one that was served least (see TenantQueue); within a
tenant it is first come, first served.

Bound. A request of class p that arrives at t is overtaken by other classes only for requests with an earlier place;
all of these arrived before t + p * ageing, so from then on its class is next until it was served. (A tenant whose
prompts fill the step already is passed meanwhile: it is being served.) Inside the class others overtake it only while
their tenants were served less or run less, and no stream of newcomers can keep that up.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

from tritonforge.errors import Overloaded
from tritonforge.scheduling.request import Phase, Request

_order = attrgetter("order")


class TenantQueue:
    """One priority class: waiting requests by tenant, and each tenant's virtual token counter.

    After Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A tenant that has nothing waiting earns
    no credit: with its next request it is lifted to the least counter of those that wait. It is also lifted to a
    virtual clock, which advances at no more than the equal share of all tenants: so newcomers, however many, come in
    time behind whoever got less than that.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[Request]] = {}
        self._served: dict[str, float] = {}
        self._clock = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def tenants(self) -> list[str]:
        """The tenants that have a request waiting here."""
        return list(self._waiting)

    def of(self, tenant: str) -> list[Request]:
        """The waiting requests of `tenant`, oldest first; not to be changed."""
        return self._waiting.get(tenant, [])

    def push(self, request: Request) -> None:
        """Put `request` in its place within its tenant."""
        if request.tenant not in self._waiting:
            self._lift(request.tenant)
            self._waiting[request.tenant] = []
        insort(self._waiting[request.tenant], request, key=_order)

    def remove(self, request: Request) -> None:
        """Take `request` out."""
        requests = self._waiting[request.tenant]
        position = bisect_left(requests, request.order, key=_order)
        assert requests[position] is request, "a request that does not wait was taken out of the queue"
        del requests[position]
        if not requests:
            del self._waiting[request.tenant]

    def oldest(self) -> tuple[int, ...]:
        """The first place that a request holds here."""
        return min(requests[0].order for requests in self._waiting.values())

    def head(self, seats: Mapping[str, int], share: float, passed: Container[str]) -> Request | None:
        """The next request: of a tenant with fewer than `share` seats if there is one, and of these, served least."""

        def place(tenant: str) -> tuple[bool, float, tuple[int, ...]]:
            return seats.get(tenant, 0) >= share, self._served[tenant], self._waiting[tenant][0].order

        tenant = min((one for one in self._waiting if one not in passed), key=place, default=None)
        return None if tenant is None else self._waiting[tenant][0]

    def charge(self, tenant: str, tokens: int, num_running_tenants: int) -> None:
        """Note that `tenant` was served `tokens`."""
        self._served[tenant] = self._served.get(tenant, self._clock) + tokens
        self._clock += tokens / (len(self._waiting) + num_running_tenants or 1)

    def _lift(self, tenant: str) -> None:
        """Lift `tenant`, and forget whoever would be lifted anyway."""
        self._clock = max(self._clock, min((self._served[name] for name in self._waiting), default=0.0))
        self._served = {
            name: served for name, served in self._served.items() if served > self._clock or name in self._waiting
        }
        self._served.setdefault(tenant, self._clock)


@dataclass(slots=True)
class Held:
    """What one tenant has in the queue, of what is bounded: requests, and prompt tokens."""

    requests: int = 0
    tokens: int = 0


class WaitingQueue:
    """All waiting requests; `max_waiting` requests and `max_waiting_tokens` prompt tokens are let in, see make_room.

    The samples of n > 1 count for one: all but the first wait beside the bounds, and are never pushed out.
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int, ageing_ns: int) -> None:
        self._bounds = {"requests": ("max_waiting", max_waiting), "tokens": ("max_waiting_tokens", max_waiting_tokens)}
        self._ageing_ns = ageing_ns
        self._arrivals = count()
        self._classes: dict[int, TenantQueue] = {}
        self._held: dict[str, Held] = {}
        self._total = Held()
        self._num_waiting = 0
        self.num_preempted = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, class by class."""
        return (one for queue in self._classes.values() for tenant in queue.tenants for one in queue.of(tenant))

    @property
    def usage(self) -> float:
        """The share of the bounds that is taken, of requests or of tokens, whichever is more; it may pass 1."""
        return max(getattr(self._total, what) / bound for what, (_, bound) in self._bounds.items())

    @property
    def tenants(self) -> set[str]:
        """The tenants that have a request waiting."""
        return {tenant for queue in self._classes.values() for tenant in queue.tenants}

    def place(self, request: Request) -> None:
        """Fix the place of a new request; a sample's is right behind its parent's."""
        number = next(self._arrivals)
        if request.parent is None:
            request.order = (request.arrival_ns + request.priority * self._ageing_ns, number)
        else:
            request.order = (*request.parent.order, number)

    def push(self, request: Request) -> None:
        """Put a request in its place: a new one, or one that was preempted."""
        request.phase = Phase.WAITING
        self._classes.setdefault(request.priority, TenantQueue()).push(request)
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        """Take a request out: it was admitted, or has ended."""
        self._classes[request.priority].remove(request)
        self._count(request, -1)

    def head(self, seats: Mapping[str, int], share: float, passed: Container[str] = ()) -> Request | None:
        """The request that is admitted next, if any: `seats` are those of the running tenants, `passed` ones wait."""
        for queue in sorted((queue for queue in self._classes.values() if queue), key=TenantQueue.oldest):
            request = queue.head(seats, share, passed)
            if request is not None:
                return request
        return None

    def charge(self, request: Request, tokens: int, num_running_tenants: int) -> None:
        """Note that the tenant of `request` was served `tokens`."""
        self._classes[request.priority].charge(request.tenant, tokens, num_running_tenants)

    def make_room(self, newcomer: Request, num_free_seats: int) -> list[Request]:
        """The waiting requests to push out so that `newcomer` can be let in; Overloaded when it cannot.

        `num_free_seats` requests may wait beyond max_waiting, and one alone may have any number of tokens. Pushed out
        is the newest request that has not started of the tenant that holds most of what is short, and only while the
        newcomer's tenant would still hold less: so a tenant that floods the queue loses only its own requests.
        """
        held = {tenant: Held(one.requests, one.tokens) for tenant, one in self._held.items()}
        mine = held.setdefault(newcomer.tenant, Held())
        pushed: list[Request] = []
        candidates: dict[str, list[Request]] = {}
        while (short := self._exceeded(newcomer, pushed, num_free_seats)) is not None:
            heaviest = max(held, key=lambda tenant: getattr(held[tenant], short))
            wanted = getattr(mine, short) + (1 if short == "requests" else len(newcomer.prompt_ids))
            if heaviest not in candidates:
                candidates[heaviest] = self._unstarted(heaviest)
            if wanted >= getattr(held[heaviest], short) or not candidates[heaviest]:
                raise self._refusal(newcomer, short, heaviest)
            victim = candidates[heaviest].pop()
            pushed.append(victim)
            held[heaviest].requests -= 1
            held[heaviest].tokens -= len(victim.prompt_ids)
        return pushed

    def _exceeded(self, newcomer: Request, pushed: list[Request], num_free_seats: int) -> str | None:
        """Which bound `newcomer` would break if `pushed` were gone."""
        waiting = self._total.requests - len(pushed)
        if waiting >= self._bounds["requests"][1] + num_free_seats:
            return "requests"
        tokens = self._total.tokens + len(newcomer.prompt_ids) - sum(len(one.prompt_ids) for one in pushed)
        return "tokens" if waiting and tokens > self._bounds["tokens"][1] else None

    def _unstarted(self, tenant: str) -> list[Request]:
        """The requests of `tenant` that may be pushed out, oldest first."""
        waiting = (one for queue in self._classes.values() for one in queue.of(tenant))
        return sorted((one for one in waiting if one.parent is None and one.preemptions == 0), key=_order)

    def _refusal(self, newcomer: Request, short: str, heaviest: str) -> Overloaded:
        name, bound = self._bounds[short]
        unit = "requests" if short == "requests" else "prompt tokens"
        mine = getattr(self._held.get(newcomer.tenant, Held()), short)
        return Overloaded(
            f"the queue is full: {getattr(self._total, short)} {unit} wait, {name} is {bound}; tenant "
            f"{newcomer.tenant!r} has {mine} of them, and a newcomer pushes another out only while its tenant would "
            f"still have less than the one with most ({heaviest!r}: {getattr(self._held[heaviest], short)})"
        )

    def _count(self, request: Request, sign: int) -> None:
        self._num_waiting += sign
        self.num_preempted += sign * (request.preemptions > 0)
        if request.parent is not None:
            return
        held = self._held.setdefault(request.tenant, Held())
        for one in (held, self._total):
            one.requests += sign
            one.tokens += sign * len(request.prompt_ids)
        if not held.requests:
            del self._held[request.tenant]

    def check_invariants(self) -> None:
        """Assert that the counts are those of the waiting requests."""
        waiting = list(self)
        counted = [one for one in waiting if one.parent is None]
        assert len(self) == len(waiting)
        assert self.num_preempted == sum(one.preemptions > 0 for one in waiting)
        assert self._total == Held(len(counted), sum(len(one.prompt_ids) for one in counted))
        assert set(self._held) == {one.tenant for one in counted}

"""Whose prefill tokens a step computes, tenant by tenant. Pure; the StepPlanner is the only caller."""

from collections.abc import Mapping, Set

SLACK_STEPS = 4
"""Tenants whose prefills differ by no more than so many full steps are even."""

HALF_LIFE_NS = 30_000_000_000
"""What a tenant computed counts half after so long."""

HEAVY = 1.5
"""A tenant that computed more than so many times its equal share of late is heavy."""

HEAVY_PART = 4
"""In a step of its own a heavy tenant prefills no more than this part of the budget."""


class RecentUse:
    """The prefill tokens that each tenant computed of late. The clock is the latest arrival among what was computed.

    So time in which nothing was asked for counts once somebody asks again, and a tenant is forgotten when less than one
    token is left of what it computed.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._now_ns = 0

    def charge(self, tenant: str, tokens: int, arrival_ns: int) -> None:
        """Note that `tenant` computed `tokens` of a request that arrived at `arrival_ns`."""
        if arrival_ns > self._now_ns:
            kept = 0.5 ** ((arrival_ns - self._now_ns) / HALF_LIFE_NS)
            self._tokens = {name: left for name, one in self._tokens.items() if (left := one * kept) >= 1.0}
            self._now_ns = arrival_ns
        self._tokens[tenant] = self._tokens.get(tenant, 0.0) + tokens

    def heavy(self) -> set[str]:
        """The tenants that computed far more than an equal share; never a tenant that is alone."""
        bound = HEAVY * sum(self._tokens.values()) / max(1, len(self._tokens))
        return {tenant for tenant, tokens in self._tokens.items() if tokens > bound}


class PrefillTurns:
    """Whose turn it is among tenants that prefill at the same time: of those that are even, who asks for least.

    Who computed more since they met, by more than a slack, comes after the others until they caught up. The first one's
    prompts go first, so a prompt that fits the step is computed at once. Of the others, who cannot finish in this step
    does not fill more than half of it: short prompts come out of short steps. Everybody gets a token of each step, so
    the oldest request always progresses.

    A flood is a tenant that is heavy and has more requests waiting. It comes last, with that one token beside others;
    in steps of its own it prefills a small part of the budget. So a tenant that comes now and then waits for a short
    step and then has one for itself. One that floods beside others that compute nothing more is soon alone, and no
    longer heavy; and short steps cost it little, since its decodes are in them.
    """

    def __init__(self) -> None:
        self._recent = RecentUse()
        self._computed: dict[str, int] = {}
        self._tenants: set[str] = set()

    def shares(self, demand: Mapping[str, int], budget: int, waiting: Set[str]) -> dict[str, int]:
        """The prefill tokens of each tenant in this step: at least 1, so `budget` must be at least len(demand).

        `waiting` are the tenants that have more requests in the queue.
        """
        self._meet(demand)
        if not demand:
            return {}
        floods = self.floods(waiting)
        most_of_flood = 1 if demand.keys() - floods else max(1, budget // HEAVY_PART)
        even = min(self._computed[tenant] for tenant in demand) + SLACK_STEPS * budget
        turns = sorted(demand, key=lambda tenant: (tenant in floods, self._computed[tenant] > even, demand[tenant]))
        shares: dict[str, int] = {}
        half = budget // 2
        for position, tenant in enumerate(turns, 1):
            room = budget - (len(turns) - position)
            if tenant in floods:
                room = min(room, most_of_flood)
            elif position > 1 and demand[tenant] > room:
                room = max(1, room - half)
            shares[tenant] = min(demand[tenant], room)
            budget -= shares[tenant]
        return shares

    def floods(self, waiting: Set[str]) -> Set[str]:
        """The tenants that are heavy, among those that have more requests in the queue."""
        return self._recent.heavy() & waiting

    def charge(self, tenant: str, tokens: int, arrival_ns: int) -> None:
        """Note what `tenant` computed of its share, for a request that arrived at `arrival_ns`."""
        self._computed[tenant] += tokens
        self._recent.charge(tenant, tokens, arrival_ns)

    def _meet(self, demand: Mapping[str, int]) -> None:
        """Lift who comes to the least of those who stay, and forget whoever would be lifted anyway."""
        least = min((self._computed[tenant] for tenant in demand if tenant in self._tenants), default=None)
        self._tenants = set(demand)
        if least is None:
            self._computed = dict.fromkeys(demand, 0)
        else:
            kept = {tenant: tokens for tenant, tokens in self._computed.items() if tokens > least}
            self._computed = dict.fromkeys(demand, least) | kept

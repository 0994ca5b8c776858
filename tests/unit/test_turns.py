"""Whose prefill tokens a step computes: shares that add up, nobody starved, and a heavy tenant that steps aside."""

from hypothesis import given
from hypothesis import strategies as st

from tritonforge.scheduling.turns import HALF_LIFE_NS, HEAVY_PART, PrefillTurns, RecentUse

BUDGET = 64
NOBODY: set[str] = set()
demands = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 4 * BUDGET), min_size=1)


def charge(turns: PrefillTurns, shares: dict[str, int], now_ns: int = 0) -> None:
    for tenant, tokens in shares.items():
        turns.charge(tenant, tokens, now_ns)


@given(st.lists(st.tuples(demands, st.integers(0, HALF_LIFE_NS), st.sets(st.sampled_from("abcdef"))), max_size=40))
def test_every_tenant_gets_a_token_of_what_it_asks_and_no_step_is_overfilled(steps):
    turns, now_ns = PrefillTurns(), 0
    for demand, pause_ns, waiting in steps:
        now_ns += pause_ns
        shares = turns.shares(demand, BUDGET, waiting)
        assert shares.keys() == demand.keys()
        assert all(1 <= shares[tenant] <= demand[tenant] for tenant in demand)
        assert sum(shares.values()) <= BUDGET
        charge(turns, shares, now_ns)


def test_the_one_that_computed_least_goes_first_and_everybody_progresses():
    turns = PrefillTurns()
    charge(turns, turns.shares({"long": 100}, 20, NOBODY))
    shares = turns.shares({"long": 80, "short": 12}, 20, NOBODY)
    assert shares == {"short": 12, "long": 1}, "long cannot finish, and half of the step is taken"
    charge(turns, shares)
    turns.charge("short", 4 * 20, 0)
    assert turns.shares({"long": 72, "short": 50}, 20, NOBODY) == {"long": 19, "short": 1}, "long catches up"


def flooded() -> PrefillTurns:
    """Turns in which `flood` computed far more than `light`."""
    turns = PrefillTurns()
    charge(turns, turns.shares({"flood": 1000, "light": 20}, BUDGET, {"flood"}))
    for _ in range(20):
        charge(turns, turns.shares({"flood": 1000}, BUDGET, {"flood"}))
    return turns


def test_a_tenant_alone_fills_the_step_however_much_it_computed():
    turns = PrefillTurns()
    for _ in range(100):
        assert turns.shares({"alone": 1000}, BUDGET, {"alone"}) == {"alone": BUDGET}
        turns.charge("alone", BUDGET, 0)


def test_a_flood_leaves_short_steps_for_whoever_comes_next_and_the_step_itself_to_who_came():
    turns = flooded()
    assert turns.shares({"flood": 1000}, BUDGET, {"flood"}) == {"flood": BUDGET // HEAVY_PART}
    shares = turns.shares({"flood": 10, "light": 60}, BUDGET, {"flood", "light"})
    assert shares == {"light": 60, "flood": 1}, "however little the flood asks"


def test_who_sends_one_request_after_another_is_no_flood_however_little_others_asked_for():
    assert flooded().shares({"flood": 1000}, BUDGET, NOBODY) == {"flood": BUDGET}


def test_who_was_not_seen_for_long_makes_nobody_a_flood():
    turns = flooded()
    turns.shares({"flood": 1000}, BUDGET, {"flood"})
    turns.charge("flood", BUDGET, 10 * HALF_LIFE_NS)
    assert turns.shares({"flood": 1000}, BUDGET, {"flood"}) == {"flood": BUDGET}


def test_equal_floods_fill_their_steps():
    turns = PrefillTurns()
    for _ in range(200):
        shares = turns.shares({"a": 1000, "b": 1000}, BUDGET, {"a", "b"})
        assert sum(shares.values()) > BUDGET // 2
        charge(turns, shares)


def test_what_was_computed_counts_half_after_a_half_life():
    use = RecentUse()
    use.charge("a", 700, 0)
    use.charge("b", 100, HALF_LIFE_NS)
    assert use.heavy() == {"a"}, "350 of 450"
    use.charge("b", 0, 3 * HALF_LIFE_NS)
    use.charge("b", 100, 3 * HALF_LIFE_NS)
    assert use.heavy() == set(), "87.5 beside 125"

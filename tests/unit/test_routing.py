"""Which release answers a request: a share of the ids, always the same ones, or the tenants that were named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonforge.errors import InvalidRequest
from tritonforge.rollout.routing import DIGEST, SHARE, VERSION, Route, Share, Target, position, share_of

STABLE, CANARY = Target("llm", 1000, "a"), Target("llm_canary", 999, "b")
fractions = st.floats(0, 1)


@given(st.text(), fractions, fractions)
def test_a_larger_share_keeps_the_requests_of_a_smaller_one(request_id, one, other):
    """Wrong: raising a share would move a conversation back and forth between the releases."""
    assert Share(min(one, other)).takes(request_id) <= Share(max(one, other)).takes(request_id)


@given(st.text(min_size=1), st.text())
def test_a_share_of_nothing_takes_nothing_and_one_of_all_takes_all(request_id, tenant):
    assert Route(STABLE, CANARY, Share(0.0)).target(request_id, tenant) == STABLE
    assert Route(STABLE, CANARY, Share(1.0)).target(request_id, tenant) == CANARY
    assert Route(STABLE).target(request_id, tenant) == STABLE


def test_the_share_of_many_ids_is_the_share_that_was_asked_for():
    """20,000 ids at 20%: a deviation of five standard deviations would be 0.0141."""
    taken = sum(Share(0.2).takes(f"request-{n}") for n in range(20_000))
    assert abs(taken / 20_000 - 0.2) < 0.0141


def test_where_an_id_lies_never_changes():
    """Clients, gateways and servers of several versions must agree."""
    assert position("") == pytest.approx(0.8894159948913374)
    assert position("request-1") == pytest.approx(0.10133399334300922)


@given(st.text())
def test_only_the_named_tenants_are_tried_on(request_id):
    share = share_of(None, ["acme", "umbrella"])
    assert share.takes(request_id, "acme") and share.takes(request_id, "umbrella")
    assert not share.takes(request_id, "other") and not share.takes(request_id)


def test_a_share_of_a_tenants_requests_is_taken_by_their_ids():
    share = share_of(0.5, ["acme"])
    taken = [n for n in range(100) if share.takes(str(n), "acme")]
    assert taken == [n for n in range(100) if position(str(n)) < 0.5]


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), True, "0.2", None])
def test_what_is_no_share_is_refused(fraction):
    with pytest.raises(InvalidRequest, match="share must be a number in"):
        Share(fraction)


@pytest.mark.parametrize("tenants", [("",), (3,)])
def test_what_is_no_tenant_is_refused(tenants):
    with pytest.raises(InvalidRequest, match="tenants must be names"):
        Share(0.1, tenants)


def test_a_canary_without_share_and_tenants_is_refused():
    with pytest.raises(InvalidRequest, match="needs a share, or tenants"):
        share_of(None, [])


@given(fractions, st.lists(st.text(min_size=1)))
def test_the_route_that_a_server_tells_is_the_one_it_has(fraction, tenants):
    share = Share(fraction, tuple(tenants))
    stable = {VERSION: "1000", DIGEST: "a"}
    canary = {VERSION: "999", DIGEST: "b", SHARE: share.to_json()}
    assert Route.of_parameters(stable, canary) == Route(STABLE, CANARY, share)
    assert Route.of_parameters(stable) == Route(STABLE)


@pytest.mark.parametrize(
    "canary", [{}, {VERSION: "x", DIGEST: "b"}, {VERSION: "9", DIGEST: "b"}, {VERSION: "9", DIGEST: "b", SHARE: "1"}]
)
def test_a_server_that_tells_no_route_is_named(canary):
    """An older server: its clients must not guess."""
    with pytest.raises(InvalidRequest):
        Route.of_parameters({VERSION: "1000", DIGEST: "a"}, canary)

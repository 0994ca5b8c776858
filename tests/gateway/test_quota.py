"""Quotas. Wrong if a tenant could use more than its limit, lost what it did not use, or felt another's use."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits.errors import StorageError

from tritonforge.gateway.api.errors import ApiError
from tritonforge.gateway.config import Tenant
from tritonforge.gateway.lengths import reserved_tokens
from tritonforge.gateway.limits.leases import MemoryLeases
from tritonforge.gateway.limits.quota import Quota, open_storage
from tritonforge.gateway.limits.taking import take
from tritonforge.gateway.routing.backend import Prompt

NOW = 1_800_000_000.0  # the start of a minute, and 08:00 of a day


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def with_quota(test):
    """Run the coroutine `test(quota, clock)`."""

    async def run():
        clock = Clock()
        return await test(Quota(open_storage("memory"), clock), clock)

    return asyncio.run(run())


async def outcomes(*calls):
    """What each call returned; False for one that was refused with 429."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for one in found:
        assert not isinstance(one, BaseException) or (isinstance(one, ApiError) and one.status == 429), one
    return [False if isinstance(one, ApiError) else one for one in found]


def test_of_200_requests_at_once_exactly_the_limit_is_taken():
    async def test(quota, clock):
        tenant = Tenant("acme", requests_per_minute=100)
        taken = await outcomes(*(quota.count_request(tenant) for _ in range(200)))
        return sum(one is not False for one in taken)

    assert with_quota(test) == 100


def test_a_refusal_says_what_the_limit_is_and_when_to_come_back():
    async def test(quota, clock):
        tenant = Tenant("acme", requests_per_minute=1)
        headers = await quota.count_request(tenant)
        assert headers["x-ratelimit-limit-requests"] == "1" and headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(ApiError) as told:
            await quota.count_request(tenant)
        return told.value

    error = with_quota(test)
    assert (error.status, error.code, error.type) == (429, "rate_limit_exceeded", "requests")
    assert int(error.headers["Retry-After"]) >= 1
    assert "requests_per_minute is 1" in error.message


def test_reservations_at_once_never_pass_the_limit_and_a_refused_one_takes_nothing():
    async def test(quota, clock):
        tenant = Tenant("acme", tokens_per_minute=1000)
        taken = [one for one in await outcomes(*(quota.reserve(tenant, 300) for _ in range(20))) if one]
        assert len(taken) == 3
        return await outcomes(quota.reserve(tenant, 101), quota.reserve(tenant, 100))

    refused, fits = with_quota(test)
    assert refused is False and fits


def test_what_was_not_used_is_given_back_exactly():
    async def test(quota, clock):
        tenant = Tenant("acme", tokens_per_minute=1000, tokens_per_day=2000)
        await quota.settle(await quota.reserve(tenant, 900), 17)
        return await outcomes(quota.reserve(tenant, 984), quota.reserve(tenant, 983))

    too_many, fits = with_quota(test)
    assert too_many is False and fits


def test_a_late_refund_reaches_the_window_that_it_was_taken_from():
    async def test(quota, clock):
        tenant = Tenant("acme", tokens_per_minute=100)
        old = await quota.reserve(tenant, 100)
        clock.now += 60
        new = await quota.reserve(tenant, 100)
        await quota.settle(old, 0)
        return new, await outcomes(quota.reserve(tenant, 1))

    new, after = with_quota(test)
    assert new and after == [False]


def test_a_day_is_over_at_midnight_and_its_refusal_waits_for_it():
    async def test(quota, clock):
        tenant = Tenant("acme", tokens_per_day=10)
        await quota.reserve(tenant, 10)
        clock.now += 60
        with pytest.raises(ApiError) as told:
            await quota.reserve(tenant, 1)
        clock.now += int(told.value.headers["Retry-After"])
        assert await quota.reserve(tenant, 10)
        return told.value

    error = with_quota(test)
    assert error.code == "insufficient_quota"
    assert int(error.headers["Retry-After"]) == 16 * 3600 - 60


def test_a_day_that_is_full_takes_nothing_from_the_minute():
    async def test(quota, clock):
        narrow = Tenant("acme", tokens_per_minute=100, tokens_per_day=10)
        assert await outcomes(quota.reserve(narrow, 50)) == [False]
        return await outcomes(quota.reserve(Tenant("acme", tokens_per_minute=100), 100))

    assert with_quota(test)[0]


def test_tenants_do_not_feel_each_other():
    async def test(quota, clock):
        acme, beta = (Tenant(name, requests_per_minute=1, tokens_per_minute=10) for name in ("acme", "beta"))
        await quota.count_request(acme)
        await quota.reserve(acme, 10)
        return await outcomes(quota.count_request(beta), quota.reserve(beta, 10))

    assert all(with_quota(test))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 400), st.floats(0, 1)), max_size=25))
def test_whatever_is_reserved_and_settled_the_sum_of_what_is_held_stays_within_the_limit(asked):
    async def test(quota, clock):
        tenant, held, used = Tenant("acme", tokens_per_minute=1000), 0, 0
        for tokens, share in asked:
            (got,) = await outcomes(quota.reserve(tenant, tokens))
            assert bool(got) == (used + held + tokens <= 1000)
            if got:
                spent = int(tokens * share)
                await quota.settle(got, spent)
                used += spent

    with_quota(test)


def test_without_limits_nothing_is_counted_and_nothing_told():
    async def test(quota, clock):
        tenant = Tenant("acme")
        return await quota.count_request(tenant), await quota.reserve(tenant, 10**9)

    headers, reservation = with_quota(test)
    assert headers == {} and reservation.headers == {} and reservation.counters == {}


def test_no_more_leases_than_the_limit_are_out_and_one_comes_back():
    async def run():
        leases = MemoryLeases()
        got = [await leases.acquire("acme", 2) for _ in range(3)]
        assert await leases.acquire("beta", 1)
        await leases.release("acme", got[0])
        return got, await leases.acquire("acme", 2)

    got, again = asyncio.run(run())
    assert [bool(one) for one in got] == [True, True, False] and again


class FailingStorage:
    """A store that is away whenever `away` is set; what it raises then is `error`."""

    def __init__(self) -> None:
        self.inner = open_storage("memory")
        self.away: set[str] = set()
        self.error: Exception = ConnectionError("no route")

    async def incr(self, counter, expiry, amount=1):
        if any(name in counter for name in self.away):
            raise StorageError(self.error)
        return await self.inner.incr(counter, expiry, amount)


BOTH = Tenant("acme", tokens_per_minute=100, tokens_per_day=1000)


def with_failing(test):
    async def run():
        storage = FailingStorage()
        quota = Quota(open_storage("memory"), lambda: NOW)
        quota._storage = storage
        return await test(quota, storage)

    return asyncio.run(run())


def test_a_store_that_goes_away_between_two_windows_leaves_nothing_taken_from_the_first():
    async def test(quota, storage):
        storage.away = {"per_day"}
        with pytest.raises(ApiError) as told:
            await quota.reserve(BOTH, 60)
        assert told.value.status == 503
        storage.away = set()
        return await quota.reserve(BOTH, 100)

    assert with_failing(test)


def test_a_refund_waits_for_a_store_that_is_away():
    async def test(quota, storage):
        held = await quota.reserve(BOTH, 100)
        storage.away = {"per_minute", "per_day"}
        await quota.settle(held, 10)
        with pytest.raises(ApiError) as told:
            await quota.reserve(BOTH, 1)
        assert told.value.status == 503
        storage.away = set()
        return await outcomes(quota.reserve(BOTH, 91), quota.reserve(BOTH, 90))

    too_many, fits = with_failing(test)
    assert too_many is False and fits


def test_a_refund_that_may_have_been_written_is_not_written_twice():
    class TimeoutError(Exception):
        """What redis-py raises is called so."""

    async def test(quota, storage):
        held = await quota.reserve(BOTH, 100)
        storage.error, storage.away = TimeoutError(), {"per_minute"}
        await quota.settle(held, 10)
        storage.away = set()
        return await outcomes(quota.reserve(BOTH, 1))

    assert with_failing(test) == [False]


def test_who_is_cancelled_while_a_store_takes_keeps_nothing():
    """Wrong: clients that leave at that moment would use up a tenant's tokens, or its seats."""

    async def run():
        begun, go, back = asyncio.Event(), asyncio.Event(), []

        async def taking():
            begun.set()
            await go.wait()
            return "seat"

        async def give_back(taken):
            back.append(taken)

        task = asyncio.create_task(take(taking(), give_back))
        await begun.wait()
        task.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return back

    assert asyncio.run(run()) == ["seat"]


@given(st.integers(1, 300), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 10**9)))
def test_no_more_is_reserved_than_a_context_can_hold(prompt, n, most):
    reserved = reserved_tokens(n, [Prompt((1,) * prompt)], [most], 256)
    assert prompt <= reserved <= prompt + n * max(1, 256 - prompt)
    assert most is None or reserved <= prompt + n * most

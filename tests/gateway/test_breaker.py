"""Breaker, prefixes and the tables of routing. Wrong if a broken place kept its requests, a recovered one stayed away,
or a policy were read otherwise than it is written.
"""

import pytest

from tritonforge.errors import InvalidRequest
from tritonforge.gateway.accounting.trace import Trace
from tritonforge.gateway.config import GatewayConfig
from tritonforge.gateway.routing.breaker import BreakerPolicy, CircuitBreaker, State
from tritonforge.gateway.routing.prefixes import BLOCK_TOKENS, PrefixIndex


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(BreakerPolicy(failures=3, open_s=2.0, most_open_s=5.0), clock)


def fail(breaker, times):
    for _ in range(times):
        breaker.failed(breaker.enter())


def test_it_opens_after_failures_in_a_row_only(breaker):
    fail(breaker, 2)
    breaker.succeeded(breaker.enter())
    fail(breaker, 2)
    assert breaker.state is State.CLOSED
    fail(breaker, 1)
    assert breaker.state is State.OPEN and not breaker.allows


def test_after_a_while_one_request_tries_and_closes_it(breaker, clock):
    fail(breaker, 3)
    clock.now = 2.0
    assert breaker.state is State.HALF_OPEN and breaker.allows
    trial = breaker.enter()
    assert not breaker.allows
    breaker.succeeded(trial)
    assert breaker.state is State.CLOSED and breaker.allows


def test_answers_that_begin_and_break_off_open_it(breaker, clock):
    """Wrong: a replica that dies in each answer would get every request, since each first token made it well again."""
    for _ in range(3):
        breaker.failed(breaker.began(breaker.enter()))
    assert breaker.state is State.OPEN
    clock.now = 2.0
    trial = breaker.began(breaker.enter())
    assert breaker.state is State.CLOSED, "its first token lets others in"
    breaker.failed(trial)
    fail(breaker, 2)
    assert breaker.state is State.OPEN, "the try that broke off counts"


def test_each_failed_try_doubles_the_wait_up_to_the_most(breaker, clock):
    fail(breaker, 3)
    for wait in (2.0, 4.0, 5.0, 5.0):
        clock.now += wait - 0.01
        assert breaker.state is State.OPEN
        clock.now += 0.01
        fail(breaker, 1)


def test_a_try_that_its_client_gave_up_lets_another_try(breaker, clock):
    fail(breaker, 3)
    clock.now = 2.0
    breaker.left(breaker.enter())
    assert breaker.allows


def test_outcomes_of_requests_from_before_it_opened_say_nothing(breaker, clock):
    early = [breaker.enter() for _ in range(5)]
    fail(breaker, 3)
    breaker.succeeded(early[0])
    assert breaker.state is State.OPEN
    clock.now = 2.0
    for one in early:
        breaker.failed(one)
    assert breaker.state is State.HALF_OPEN


def test_the_longest_known_prefix_of_a_tenant_is_found_and_old_ones_are_forgotten():
    index = PrefixIndex(max_entries=4)
    long, short = list(range(3 * BLOCK_TOKENS)), list(range(BLOCK_TOKENS)) + [7] * BLOCK_TOKENS
    index.learn(index.keys_of(long, "acme"), "a")
    assert index.find(index.keys_of([*long, 1, 2], "acme")) == "a"
    assert index.find(index.keys_of(short, "acme")) == "a"
    assert index.find(index.keys_of(long, "beta")) is None
    assert index.keys_of(long[: BLOCK_TOKENS - 1], "acme") == []
    index.learn(index.keys_of([9] * 4 * BLOCK_TOKENS, "acme"), "b")
    assert index.find(index.keys_of(long, "acme")) is None


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"models": {"m": {}}}, "replicas"),
        ({"models": {"m": {"replicas": ["nowhere"]}}}, "host:port"),
        ({"models": {"m": {"replicas": ["a:1", "a:1"]}}}, "differ"),
        ({"models": {"m": {"replicas": ["a:1"], "colour": 1}}}, "colour"),
        ({"managed": {"c": {"base_url": "ftp://x", "model": "m"}}}, "base_url"),
        ({"managed": {"c": {"base_url": "http://x"}}}, "model"),
        ({"aliases": {"x": {"models": {"m": 0.5, "n": 0.4}}}}, "add up to 1"),
        ({"aliases": {"x": {"models": "m", "retry_on": ["bad luck"]}}}, "bad luck"),
        ({"aliases": {"x": {"models": "m", "max_tries": 0}}}, "max_tries"),
        ({"aliases": {"x": {"models": "m", "first_token_s": -1}}}, "first_token_s"),
        ({"aliases": {"x": {"models": "m", "releases": {"acme": "newest"}}}}, "newest"),
        ({"models": {"m": {"replicas": ["a:1"]}}, "aliases": {"x": {"models": "n"}}}, "'n'"),
        ({"models": {"m": {"replicas": ["a:1"]}}, "aliases": {"x": {"models": "m", "fallback": ["y"]}}}, "'y'"),
        ({"routing": {"failures": 0}}, "failures"),
        ({"routing": {"health_s": 0}}, "health_s"),
        ({"defaults": {"audit_content": 1}}, "audit_content"),
    ],
)
def test_a_table_that_breaks_a_rule_is_refused_with_the_rule(tables, named):
    with pytest.raises(InvalidRequest, match=named):
        GatewayConfig.of_tables(tables)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
    ],
)
def test_a_malformed_traceparent_begins_a_new_trace(header):
    trace = Trace.of_header(header)
    assert trace.parent == "" and "4bf92f" not in trace.traceparent


def test_a_traceparent_of_a_later_version_is_read_by_what_is_known_of_it():
    trace = Trace.of_header("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-03-more")
    assert trace.traceparent == f"00-4bf92f3577b34da6a3ce929d0e0e4736-{trace.span_id}-01"

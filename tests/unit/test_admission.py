"""Who is admitted next, who is refused and who is pushed out: classes age, tenants share, nobody starves."""

import random
from collections import Counter

import pytest

from tritonforge.errors import Overloaded
from tritonforge.scheduling.admission import WaitingQueue
from tritonforge.scheduling.request import Request

AGEING_NS = 1000


def queue_of(max_waiting=100, max_waiting_tokens=10_000):
    return WaitingQueue(max_waiting, max_waiting_tokens, AGEING_NS)


def put(queue, tenant="", *, priority=5, at=0, tokens=1, parent=None):
    request = Request(0, [0] * tokens, 8, priority=priority, tenant=tenant, arrival_ns=at, parent=parent)
    queue.place(request)
    queue.push(request)
    return request


def take(queue, seats=(), share=1.0):
    """Admit the next request and charge its prompt; nobody holds a seat."""
    request = queue.head(dict(seats), share)
    queue.remove(request)
    queue.charge(request, len(request.prompt_ids), 1)
    return request


def test_one_tenant_and_one_class_are_first_come_first_served():
    queue = queue_of()
    requests = [put(queue, at=i) for i in range(5)]
    assert [take(queue) for _ in requests] == requests
    assert queue.head({}, 1.0) is None or not len(queue)


def test_an_urgent_class_goes_first_until_the_other_has_aged():
    queue = queue_of()
    patient = put(queue, priority=9, at=0)
    early = put(queue, priority=0, at=9 * AGEING_NS - 1)
    late = put(queue, priority=0, at=9 * AGEING_NS + 1)
    assert [take(queue) for _ in range(3)] == [early, patient, late]


@pytest.mark.parametrize("priority", range(10))
def test_a_request_waits_for_none_that_arrives_its_class_times_the_ageing_later(priority):
    queue = queue_of()
    request = put(queue, priority=priority, at=0)
    for at in range(0, 20 * AGEING_NS, AGEING_NS // 2):
        put(queue, priority=0, at=at)
        taken = take(queue)
        if taken is request:
            return
        assert taken.arrival_ns <= priority * AGEING_NS
    pytest.fail("the request starves")


def test_tenants_are_served_equal_tokens_however_many_requests_they_send():
    queue = queue_of()
    for i in range(300):
        put(queue, "many short", at=i, tokens=10)
    for i in range(30):
        put(queue, "few long", at=i, tokens=100)
    served = Counter()
    for _ in range(110):
        request = take(queue)
        served[request.tenant] += len(request.prompt_ids)
    assert abs(served["many short"] - served["few long"]) <= 100, "they differ by more than one request"


def test_being_idle_earns_no_credit():
    """Wrong: a tenant that comes back after a long time is served alone until it has caught up."""
    queue = queue_of()
    put(queue, "idle")
    take(queue)
    for i in range(200):
        put(queue, "busy", at=i, tokens=10)
    for _ in range(100):
        take(queue)
    for i in range(100):
        put(queue, "idle", at=i, tokens=10)
    turns = Counter(take(queue).tenant for _ in range(40))
    assert abs(turns["idle"] - turns["busy"]) <= 1


def test_a_debt_is_not_forgotten_by_leaving_for_a_moment():
    queue = queue_of()
    for i in range(50):
        put(queue, "steady", at=i, tokens=10)
    taken = Counter()
    for i in range(40):
        if not any(request.tenant == "hit and run" for request in queue):
            put(queue, "hit and run", at=i, tokens=90)
        request = take(queue)
        taken[request.tenant] += len(request.prompt_ids)
    assert taken["hit and run"] <= taken["steady"] + 90


def test_a_stream_of_new_tenants_starves_nobody():
    """Each newcomer was served nothing yet; that must not put all of them before one that was."""
    queue = queue_of()
    put(queue, "old", tokens=100)
    take(queue)
    put(queue, "old", tokens=100)
    put(queue, "new")
    for i in range(2000):
        put(queue, f"new {i}")
        if take(queue).tenant == "old":
            return
    pytest.fail("the old tenant starves")


def test_tenants_below_their_share_of_the_seats_go_first():
    queue = queue_of()
    put(queue, "holds many", at=0)
    second = put(queue, "holds one", at=1)
    assert queue.head({"holds many": 3, "holds one": 1}, share=2.0) is second


def test_a_tenant_that_was_passed_does_not_hold_up_the_others():
    queue = queue_of()
    put(queue, "full", at=0, priority=0)
    other = put(queue, "other", at=1, priority=9)
    assert queue.head({}, 1.0, passed={"full"}) is other
    assert queue.head({}, 1.0, passed={"full", "other"}) is None


def test_a_preempted_request_goes_back_to_its_place():
    queue = queue_of()
    first, second = put(queue, at=0), put(queue, at=1)
    assert take(queue) is first
    queue.push(first)
    assert [take(queue), take(queue)] == [first, second]


def test_a_sample_waits_behind_its_parent_and_before_everybody_later_and_counts_for_nothing():
    queue = queue_of(max_waiting=1)
    parent = put(queue, at=0)
    later = put(queue, at=0)
    take(queue)
    sample = put(queue, at=50, parent=parent)
    assert len(queue) == 2
    with pytest.raises(Overloaded, match=r"1 requests wait, max_waiting is 1"):
        queue.make_room(Request(9, [0], 1), 0)
    assert [take(queue), take(queue)] == [sample, later]


def test_a_full_queue_refuses_the_newcomer_of_a_lone_tenant_and_says_the_rule():
    queue = queue_of(max_waiting=2)
    put(queue, "a"), put(queue, "a")
    with pytest.raises(Overloaded, match=r"2 requests wait, max_waiting is 2; tenant 'a' has 2 of them.*'a': 2"):
        queue.make_room(Request(9, [0], 1, tenant="a"), 0)
    assert queue.make_room(Request(9, [0], 1, tenant="a"), 1) == [], "a free seat is room for one more"


def test_prompt_tokens_are_bounded_but_one_request_alone_always_gets_in():
    queue = queue_of(max_waiting_tokens=10)
    assert queue.make_room(Request(9, [0] * 50, 1), 0) == []
    put(queue, tokens=8)
    assert queue.make_room(Request(9, [0] * 2, 1), 0) == []
    with pytest.raises(Overloaded, match=r"8 prompt tokens wait, max_waiting_tokens is 10"):
        queue.make_room(Request(9, [0] * 3, 1), 0)


def test_the_newest_of_the_heaviest_tenant_is_pushed_out_for_a_light_one():
    queue = queue_of(max_waiting=4)
    flood = [put(queue, "flood", at=i) for i in range(4)]
    assert queue.make_room(Request(9, [0], 1, tenant="light"), 0) == [flood[-1]]


def test_what_has_started_is_never_pushed_out():
    queue = queue_of(max_waiting=3)
    flood = [put(queue, "flood", at=i) for i in range(3)]
    flood[2].preemptions = 1
    assert queue.make_room(Request(9, [0], 1, tenant="light"), 0) == [flood[1]]
    for request in flood:
        request.preemptions = 1
    with pytest.raises(Overloaded):
        queue.make_room(Request(9, [0], 1, tenant="light"), 0)


def test_equal_tenants_do_not_push_each_other_out():
    """Wrong: each newcomer throws out the other tenant's last, in turn, and work is refused that was accepted."""
    queue = queue_of(max_waiting=5)
    for i in range(3):
        put(queue, "a", at=i)
    for i in range(2):
        put(queue, "b", at=i)
    with pytest.raises(Overloaded):
        queue.make_room(Request(9, [0], 1, tenant="b"), 0)


def test_for_tokens_as_many_are_pushed_out_as_it_takes_or_none():
    queue = queue_of(max_waiting_tokens=100)
    flood = [put(queue, "flood", at=i, tokens=25) for i in range(4)]
    assert queue.make_room(Request(9, [0] * 30, 1, tenant="light"), 0) == [flood[3], flood[2]]
    with pytest.raises(Overloaded, match="max_waiting_tokens"):
        queue.make_room(Request(9, [0] * 80, 1, tenant="light"), 0)
    queue.check_invariants()
    assert len(queue) == 4, "a refusal pushes nobody out"


def test_random_pushes_and_removals_keep_the_counts():
    rng = random.Random(5)
    queue, waiting = queue_of(), []
    for i in range(1000):
        if waiting and rng.random() < 0.5:
            request = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(request)
        else:
            waiting.append(put(queue, rng.choice("abc"), priority=rng.randrange(10), at=i, tokens=rng.randrange(1, 9)))
        queue.check_invariants()
        assert set(queue) == set(waiting)

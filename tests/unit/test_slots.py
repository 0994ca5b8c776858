"""Prefix reuse in a linear KV cache: the first tokens of a slot, in place or by a copy, and never what is not there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonforge.errors import InvalidRequest
from tritonforge.scheduling.blocks import BlockManager
from tritonforge.scheduling.request import FinishReason, Request
from tritonforge.scheduling.scheduler import Scheduler, SchedulerConfig
from tritonforge.scheduling.slots import SlotContents, common_tokens

CONTEXT = 64


def scheduler(num_slots, seats=None):
    config = SchedulerConfig(seats or num_slots, 256, max_waiting=16, max_waiting_tokens=4096)
    return Scheduler(config, BlockManager(num_slots, CONTEXT, linear=True))


def step(subject):
    """One step in which every sampled token is 9; returns the plan."""
    plan = subject.schedule()
    subject.commit(plan, [[9] for work in plan.work if work.samples])
    subject.check_invariants()
    return plan


def ask(subject, prompt, *, max_tokens=8, **options):
    request = Request(0, tuple(prompt), max_tokens, **options)
    subject.add(request)
    return request


def answer(subject, prompt, **options):
    """The request and its slot, after it ran to its end."""
    request = ask(subject, prompt, **options)
    step(subject)
    [slot] = request.block_table or [None]
    while request.finish_reason is None:
        step(subject)
    return request, slot


tokens = st.lists(st.integers(0, 2), max_size=12)


@given(first=tokens, second=tokens)
def test_common_tokens_end_before_the_first_that_differs(first, second):
    contents = SlotContents()
    contents.begin(3, "", first)
    found, slot = contents.longest_prefix([0, 3], "", second)
    expected = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    expected = min(len(first), len(second)) if expected is None else expected
    assert (found, slot) == (expected, 3 if expected else None)
    assert common_tokens(b"", b"") == 0


def test_the_next_turn_of_a_chat_continues_in_the_slot_of_the_last():
    subject = scheduler(4)
    first, slot = answer(subject, range(20, 30))
    heard = [*first.prompt_ids, *first.output_ids]
    answer(subject, range(40, 50))
    following = ask(subject, [*heard, 1, 2, 3])
    plan = step(subject)
    assert following.block_table == [slot] and not plan.copies
    assert following.num_cached_tokens == len(heard) - 1, "the last token was never computed"


def test_a_prompt_that_shares_little_of_a_slot_gets_a_copy_and_the_slot_keeps_its_rest():
    subject = scheduler(4)
    template, long = [1, 2, 3], list(range(10, 40))
    answer(subject, [*template, *long])
    other = ask(subject, [*template, 50, 51])
    plan = step(subject)
    assert len(plan.copies) == 1 and plan.copies[0][1] == other.block_table[0]
    assert other.num_cached_tokens == len(template)
    again = ask(subject, [*template, *long, 7])
    step(subject)
    assert again.num_cached_tokens == len(template) + len(long)


def test_the_prompt_of_a_running_request_is_copied_not_taken():
    subject = scheduler(3)
    running = ask(subject, range(20), max_tokens=30)
    step(subject)
    other = ask(subject, [*range(20), 5], max_tokens=30)
    plan = step(subject)
    assert plan.copies == ((running.block_table[0], other.block_table[0]),)
    assert other.num_cached_tokens == 20


def test_what_a_new_request_overwrites_is_not_found_any_more():
    subject = scheduler(1)
    answer(subject, range(20, 40))
    taken = ask(subject, [*range(20, 38), 1, 1], max_tokens=2)
    step(subject)
    assert taken.num_cached_tokens == 18
    subject.finish(taken, FinishReason.CANCELLED)
    last = ask(subject, range(20, 40))
    step(subject)
    assert last.num_cached_tokens == 18, "tokens 38 and 39 were overwritten by others"


def test_a_step_that_failed_leaves_only_what_was_computed_before_it():
    subject = scheduler(1)
    answer(subject, range(20, 40))
    broken = ask(subject, [*range(20, 38), 1, 1])
    subject.schedule()
    subject.finish(broken, FinishReason.ERROR)
    whole = ask(subject, range(20, 40))
    step(subject)
    assert whole.num_cached_tokens == 18, "the failed step may have overwritten the tokens behind"


def test_the_slot_that_was_free_for_longest_is_handed_out_first():
    subject = scheduler(2)
    answer(subject, range(10, 20))
    answer(subject, range(30, 40))
    answer(subject, range(50, 60))
    kept = ask(subject, range(30, 40))
    step(subject)
    assert kept.num_cached_tokens == 9
    gone = ask(subject, range(10, 20))
    step(subject)
    assert gone.num_cached_tokens == 0


def test_prompts_with_other_salts_share_nothing():
    subject = scheduler(4)
    answer(subject, range(20), cache_salt="mine")
    for salt, shared in (("", 0), ("yours", 0), ("mine", 19)):
        assert answer(subject, range(20), cache_salt=salt)[0].num_cached_tokens == shared


def test_a_request_that_reuses_no_prefix_gets_none():
    subject = scheduler(4)
    answer(subject, range(20))
    assert answer(subject, range(20), reuse_prefix=False)[0].num_cached_tokens == 0


def test_other_samples_of_a_prompt_get_copies_of_its_slot():
    subject = scheduler(3)
    parent = ask(subject, range(20), max_tokens=20)
    step(subject)
    child = Request(1, parent.prompt_ids, 20)
    subject.fork(parent, child)
    plan = step(subject)
    assert plan.copies == ((parent.block_table[0], child.block_table[0]),)
    assert child.output_ids == [9], "only the last prompt token was left to compute"


def test_a_preempted_request_finds_its_own_slot_again():
    subject = scheduler(2)
    flood = [ask(subject, range(start, start + 10), max_tokens=40, tenant="flood") for start in (100, 200)]
    for _ in range(5):
        step(subject)
    ask(subject, range(10), max_tokens=1, tenant="light")
    plan = step(subject)
    [victim] = plan.preempted
    assert victim is flood[1]
    while not victim.block_table:
        step(subject)
    assert victim.num_computed_tokens >= 10, "it was computed from its first token on"


def test_a_request_longer_than_a_slot_is_refused_however_many_slots_there_are():
    with pytest.raises(InvalidRequest, match="must fit 1 KV blocks of 64 tokens, got 65"):
        ask(scheduler(4), range(60), max_tokens=5)

"""Single rules of the scheduler, by example; the random workloads of tests/simulation prove that they hold together."""

import pytest

from tritonforge.errors import InvalidRequest
from tritonforge.scheduling.blocks import BlockManager
from tritonforge.scheduling.request import FinishReason, Phase, Request
from tritonforge.scheduling.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE = 4


def make(num_blocks=64, *, seats=4, budget=64, propose=None, **config):
    limits = {"max_waiting": 64, "max_waiting_tokens": 4096} | config
    return Scheduler(SchedulerConfig(seats, budget, **limits), BlockManager(num_blocks, BLOCK_SIZE), propose)


def ask(scheduler, prompt, max_tokens=8, **fields):
    """Add a request; `prompt` is its tokens, or how many."""
    prompt = list(range(prompt)) if isinstance(prompt, int) else prompt
    request = Request(0, prompt, max_tokens, **fields)
    scheduler.add(request)
    return request


def step(scheduler, *, tokens=None):
    """Schedule, and commit `tokens` (or one 0) for each request that samples; returns the plan."""
    plan = scheduler.schedule()
    scheduler.commit(plan, [tokens or [0] for work in plan.work if work.samples])
    scheduler.check_invariants()
    return plan


def counts(plan):
    return {work.request: work.num_new_tokens for work in plan.work}


@pytest.mark.parametrize("length", [2, 4, 5, 8])
def test_a_sample_shares_full_blocks_copies_the_partial_one_and_computes_one_token(length):
    """Wrong: the sample writes into a block that its parent reads, or computes the prompt again."""
    scheduler = make()
    parent = ask(scheduler, length)
    step(scheduler)
    child = Request(1, parent.prompt_ids, 8)
    scheduler.fork(parent, child)
    plan = scheduler.schedule()
    assert counts(plan)[child] == 1 and child.num_cached_tokens == length - 1
    shared = (length - 1) // BLOCK_SIZE
    assert child.block_table[:shared] == parent.block_table[:shared]
    assert child.block_table[shared] not in parent.block_table
    expected = ((parent.block_table[shared], child.block_table[shared]),) if (length - 1) % BLOCK_SIZE else ()
    assert plan.copies == expected


def test_a_sample_whose_parent_is_gone_relies_on_the_prefix_cache():
    scheduler = make(seats=1)
    parent = ask(scheduler, 9, max_tokens=2)
    step(scheduler)
    child = Request(1, parent.prompt_ids, 2)
    scheduler.fork(parent, child)
    step(scheduler)
    assert parent.finish_reason is FinishReason.LENGTH
    plan = step(scheduler)
    assert plan.copies == () and counts(plan) == {child: 1} and child.num_cached_tokens == 8


def test_a_sample_goes_before_requests_that_wait_already():
    scheduler = make(seats=2)
    parent, other = ask(scheduler, 3, max_tokens=9), ask(scheduler, 3, max_tokens=2)
    waiting = ask(scheduler, 3)
    step(scheduler)
    child = Request(1, parent.prompt_ids, 8)
    scheduler.fork(parent, child)
    step(scheduler)
    assert other.phase is Phase.FINISHED
    step(scheduler)
    assert child.phase is Phase.RUNNING and waiting.phase is Phase.WAITING


def test_prefixes_are_shared_only_among_equal_salts():
    scheduler = make()
    ask(scheduler, 9, cache_salt="mine")
    step(scheduler)
    same, other, none = ask(scheduler, 9, cache_salt="mine"), ask(scheduler, 9, cache_salt="other"), ask(scheduler, 9)
    step(scheduler)
    assert [one.num_cached_tokens for one in (same, other, none)] == [8, 0, 0]
    assert (scheduler.num_prefix_queries, scheduler.num_prefix_hits) == (4 * 9, 8)


def test_a_request_that_reuses_nothing_computes_all_in_bounded_chunks_and_still_publishes():
    scheduler = make()
    ask(scheduler, 9)
    step(scheduler)
    whole = ask(scheduler, 9, reuse_prefix=False, max_chunk=4)
    chunks = [counts(step(scheduler))[whole] for _ in range(3)]
    assert chunks == [4, 4, 1] and whole.num_cached_tokens == 0
    assert scheduler.num_prefix_queries == 9, "it asked the cache nothing"


def test_preempted_requests_count_no_second_look_at_the_prefix_cache():
    scheduler = make(num_blocks=6, watermark=0.0)
    for start in (0, 100):
        ask(scheduler, range(start, start + 8), max_tokens=16)
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.num_preemptions > 0 and scheduler.num_prefix_queries == 16


def test_accepted_drafts_are_told_one_by_one_and_count_as_computed():
    scheduler = make(propose=lambda request, most: [7, 7, 7][:most])
    request = ask(scheduler, 3, max_tokens=9)
    step(scheduler)
    plan = scheduler.schedule()
    assert plan.work[0].draft == (7, 7, 7) and plan.work[0].num_logits == 4
    assert plan.work[0].token_ids() == [0, 7, 7, 7]
    events = scheduler.commit(plan, [[7, 7, 5]])
    assert [event.token_id for event in events] == [7, 7, 5]
    assert request.num_tokens - request.num_computed_tokens == 1
    assert (scheduler.num_draft_tokens, scheduler.num_accepted_tokens) == (3, 2)
    scheduler.check_invariants()


def test_nothing_follows_the_last_token_of_a_draft():
    scheduler = make(propose=lambda request, most: [7] * most)
    request = ask(scheduler, 3, max_tokens=9, stop_token_ids=frozenset({2}))
    step(scheduler)
    events = scheduler.commit(scheduler.schedule(), [[7, 2, 7, 7]])
    assert [event.token_id for event in events] == [7, 2] and events[-1].finish_reason is FinishReason.STOP
    assert request.output_ids == [0, 7, 2] and scheduler.num_generated_tokens == 3
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


def test_a_draft_is_never_longer_than_the_answer_can_be():
    wanted = []
    scheduler = make(propose=lambda request, most: wanted.append(most) or [])
    ask(scheduler, 3, max_tokens=4)
    while scheduler.has_work:
        step(scheduler)
    assert wanted == [2, 1], "after the first token three may come, after the second two: one is sampled anyway"


def test_a_draft_takes_no_block_while_somebody_waits():
    wanted = []
    scheduler = make(seats=1, propose=lambda request, most: wanted.append(most) or [1] * most)
    ask(scheduler, 6, max_tokens=20)
    ask(scheduler, 6, max_tokens=20)
    step(scheduler)
    plan = step(scheduler)
    assert wanted == [1], "its last block has room for token 7, and one more"
    assert plan.work[0].num_new_tokens == 2


def test_a_row_that_could_not_be_drawn_is_as_if_not_computed():
    scheduler = make()
    request = ask(scheduler, 3)
    plan = scheduler.schedule()
    assert scheduler.commit(plan, [None]) == [] and request.num_computed_tokens == 0
    assert counts(step(scheduler)) == {request: 3}


def test_prompts_of_another_tenant_do_not_take_a_short_prompts_step():
    scheduler = make(budget=16, num_blocks=200)
    ask(scheduler, 300, tenant="long")
    step(scheduler)
    short = ask(scheduler, range(500, 510), tenant="short")
    assert counts(step(scheduler))[short] == 10


def test_decodes_of_a_flood_stay_out_of_another_tenants_prompt_every_other_step():
    """Wrong: a prompt waits for a full batch with each of its chunks, or the flood stands still beside a long one."""
    scheduler = make(num_blocks=256, seats=8, budget=16)
    for number in range(20):
        ask(scheduler, [number] * 12, max_tokens=40, tenant="flood")
    for _ in range(12):
        step(scheduler)
    light = ask(scheduler, range(500, 560), tenant="light")
    plans = [step(scheduler) for _ in range(6)]
    assert all(counts(plan)[light] > 1 for plan in plans[:4])
    decodes = [sum(work.request.tenant == "flood" for work in plan.work) for plan in plans]
    assert decodes[0] == decodes[2] == 1, "the oldest"
    assert decodes[1] == decodes[3] == 7


def test_a_tenant_without_a_seat_gets_one_from_the_tenant_with_most():
    scheduler = make(seats=4)
    flood = [ask(scheduler, 4, max_tokens=30, tenant="flood", arrival_ns=i) for i in range(6)]
    step(scheduler)
    light = [ask(scheduler, 4, max_tokens=30, tenant="light", arrival_ns=10) for _ in range(4)]
    plan = step(scheduler)
    assert set(plan.preempted) == {flood[3], flood[2]}, "the newest, down to equal shares"
    assert [one.phase for one in light] == [Phase.RUNNING] * 2 + [Phase.WAITING] * 2
    assert scheduler.num_fairness_preemptions == 2
    for _ in range(10):
        assert not step(scheduler).preempted, "the shares are equal, and stay"


def test_nobody_more_urgent_is_preempted_for_fairness():
    scheduler = make(seats=2)
    for _ in range(2):
        ask(scheduler, 4, max_tokens=30, tenant="urgent", priority=0)
    step(scheduler)
    ask(scheduler, 4, tenant="other", priority=5)
    assert not step(scheduler).preempted


def test_a_request_makes_others_give_way_once_only():
    scheduler = make(seats=2)
    for _ in range(2):
        ask(scheduler, 4, max_tokens=30, tenant="flood")
    step(scheduler)
    light = ask(scheduler, 4, tenant="light")
    scheduler.waiting.remove(light)
    light.preemptions = 1
    scheduler.waiting.push(light)
    assert not step(scheduler).preempted


def test_an_admission_leaves_the_watermark_and_what_is_promised_to_running_prompts():
    scheduler = make(num_blocks=20, budget=16, watermark=0.1)
    ask(scheduler, 40, tenant="a", max_tokens=4)
    step(scheduler)
    big = ask(scheduler, range(500, 533), tenant="b", max_tokens=4)
    step(scheduler)
    assert big.phase is Phase.WAITING, "10 of 20 blocks are promised, 2 the watermark; it needs 9"
    scheduler.finish(big, FinishReason.CANCELLED)
    small = ask(scheduler, range(500, 530), tenant="b", max_tokens=4)
    step(scheduler)
    assert small.phase is Phase.RUNNING


def test_usage_is_the_share_of_held_blocks():
    scheduler = make(num_blocks=8)
    assert scheduler.kv_cache_usage == 0.0
    request = ask(scheduler, 8)
    step(scheduler)
    assert scheduler.kv_cache_usage == 2 / 8
    scheduler.finish(request, FinishReason.CANCELLED)
    assert scheduler.kv_cache_usage == 0.0


def test_refusals_are_counted_by_their_reason():
    scheduler = make(num_blocks=8, seats=1, max_waiting=2)
    with pytest.raises(InvalidRequest, match="8 KV blocks"):
        ask(scheduler, 30)
    for _ in range(3):
        ask(scheduler, 3, tenant="flood")
    [pushed] = scheduler.add(Request(9, [1], 1, tenant="light"))
    assert pushed.finish_reason is FinishReason.ERROR and pushed.tenant == "flood"
    assert dict(scheduler.num_refused) == {"never fits": 1, "pushed out": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_seqs", 0), ("ageing_ms", 1.5), ("watermark", 1.0), ("watermark", "0.1"), ("watermark", float("nan"))],
)
def test_a_wrong_limit_is_refused_by_name_and_value(field, value):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_waiting": 1, "max_waiting_tokens": 1}
    SchedulerConfig(**limits)
    with pytest.raises(InvalidRequest, match=rf"scheduler.{field} must be .*, got {value!r}"):
        SchedulerConfig(**limits | {field: value})

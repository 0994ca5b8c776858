"""The linear engines' shared logic: whatever the calls, a sequence's logits are those of its own tokens.

If one of these fails, an answer would depend on its neighbours, on padding, or on what a slot held before.
"""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "simulation"))

from slot_engine import SlotEngine

from tritonforge.engines.base import EngineSpec, SequenceStep
from tritonforge.engines.linear import cache_len_for
from tritonforge.engines.linear_calls import CallLimits, Share, boxes, group_by_width, split
from tritonforge.engines.linear_rows import SlotRows
from tritonforge.engines.simulated import logits_of
from tritonforge.errors import EngineFailure, InvalidRequest

VOCAB = 16
CONTEXT = 48


def limits(**changes):
    fields = dict(
        views=(64,), max_tokens=CONTEXT, max_wide_rows=8, max_logit_rows=CONTEXT, narrow_tokens=4, call_cost=4
    )
    return CallLimits(**fields | changes)


def engine(num_slots=4, **changes):
    return SlotEngine(EngineSpec(VOCAB, CONTEXT, CONTEXT, num_slots), limits(**changes))


def share(row, width, start=0):
    return Share(row, start, [0] * width, range(1))


shapes = st.builds(
    limits,
    views=st.sampled_from([(64,), (128,), (8, 16, 32, 64), (16, 64)]),
    max_tokens=st.sampled_from([1, 3, 8, CONTEXT]),
    max_wide_rows=st.sampled_from([1, 2, 8]),
    max_logit_rows=st.sampled_from([1, 2, CONTEXT]),
    narrow_tokens=st.sampled_from([1, 4, 16]),
    widths=st.sampled_from([(), (8, 16), (16,)]),
    call_cost=st.sampled_from([0, 4, 100]),
)


@given(shape=shapes, num_slots=st.integers(1, 6), seed=st.integers(0, 1 << 20))
def test_logits_are_those_of_the_sequence_alone(shape, num_slots, seed):
    """Chunks, decodes, drafts that are rejected, slots that are copied, handed out anew or begun in the middle."""
    rng = random.Random(seed)
    subject = SlotEngine(EngineSpec(VOCAB, CONTEXT, CONTEXT, num_slots), shape)
    texts = [[] for _ in range(num_slots)]
    for _ in range(30):
        if rng.random() < 0.1:
            source, destination = rng.randrange(num_slots), rng.randrange(num_slots)
            subject.copy_blocks([(source, destination)])
            texts[destination] = list(texts[source])
        sequences, wanted = [], []
        for slot in rng.sample(range(num_slots), rng.randint(0, num_slots)):
            kept = len(texts[slot]) if rng.random() < 0.7 else rng.randint(0, len(texts[slot]))
            count = min(rng.choice((1, 1, 1, 2, 4, 9, 40)), CONTEXT - kept)
            if count == 0:
                kept, count = 0, 1
            num_logits = rng.choice((0, 1, count))
            texts[slot] = texts[slot][:kept] + [rng.randrange(VOCAB) for _ in range(count)]
            sequences.append(SequenceStep(texts[slot][kept:], kept, [slot], num_logits))
            wanted += [texts[slot][:end] for end in range(len(texts[slot]) - num_logits + 1, len(texts[slot]) + 1)]
        np.testing.assert_array_equal(subject.step(sequences), logits_of(wanted, VOCAB))
    for call in subject.calls:
        batch, tokens = call.input_ids.shape
        assert tokens <= max(shape.max_tokens, *shape.widths, shape.narrow_tokens)
        assert tokens == 1 or batch <= shape.max_wide_rows
        assert 1 <= len(call.logit_rows) <= max(shape.max_logit_rows * batch, 1)
        assert all(array.dtype == np.int64 for array in (call.input_ids, call.write_index, call.logit_rows))


def test_decodes_share_one_call_and_a_long_chunk_has_its_own():
    subject = engine()
    subject.step([SequenceStep([1] * 20, 0, [0]), SequenceStep([2] * 3, 0, [1]), SequenceStep([3] * 2, 0, [2])])
    assert [call.input_ids.shape for call in subject.calls] == [(2, 3), (1, 20)]
    subject.calls.clear()
    subject.step([SequenceStep([1], 20, [0]), SequenceStep([2], 3, [1]), SequenceStep([3], 2, [2])])
    [call] = subject.calls
    assert call.input_ids.shape == (3, 1) and call.logit_rows.tolist() == [0, 1, 2]


def test_rows_that_run_are_brought_together_once():
    subject = engine(num_slots=8)
    decodes = {slot: 5 for slot in (0, 3, 7)}
    subject.step([SequenceStep([slot] * 5, 0, [slot]) for slot in range(8)])
    for step in range(5):
        subject.calls.clear()
        subject.moved = 0
        subject.step([SequenceStep([1], length + step, [slot]) for slot, length in decodes.items()])
        [call] = subject.calls
        assert len(call.write_index) == 3, "rows that take no part are computed, too"
        assert (subject.moved > 0) == (step == 0)


@given(filled=st.lists(st.integers(0, 9), min_size=1, max_size=12), data=st.data())
def test_gathering_moves_each_outsider_once_and_nobody_else(filled, data):
    rows = SlotRows(len(filled))
    rows.lengths = list(filled)
    slots = data.draw(st.sets(st.integers(0, len(filled) - 1)))
    before = {slot: rows.row(slot) for slot in range(len(filled))}
    content = {before[slot]: slot for slot in before}
    for move in rows.gather(slots):
        one, other = content[move.source], content[move.destination]
        assert move.num_tokens >= (filled[one] if move.copies else max(filled[one], filled[other]))
        assert not move.copies or filled[other] == 0, "a row with content is overwritten"
        content[move.source], content[move.destination] = other, one
    assert {slot: row for row, slot in content.items()} == {slot: rows.row(slot) for slot in before}
    found = sorted(rows.row(slot) for slot in slots)
    assert found == list(range(found[0], found[0] + len(found))) if found else True
    moved = [slot for slot in slots if rows.row(slot) != before[slot]]
    assert len(moved) < max(1, len(slots)), "one of them could have stayed"


@given(widths=st.lists(st.integers(1, 9), min_size=1, max_size=8), call_cost=st.integers(0, 20))
def test_groups_cost_no_more_than_any_other_runs_of_widths(widths, call_cost):
    shares = [share(row, width) for row, width in enumerate(widths)]

    def cost(groups):
        return sum(call_cost + len(group) * max(one.width for one in group) for group in groups)

    groups = group_by_width(shares, call_cost)
    assert sorted(one.row for group in groups for one in group) == list(range(len(widths)))
    distinct = sorted(set(widths))
    for cuts in range(1 << (len(distinct) - 1)):
        runs, run = [], []
        for index, width in enumerate(distinct):
            run += [one for one in shares if one.width == width]
            if cuts >> index & 1 or index == len(distinct) - 1:
                runs.append(run)
                run = []
        assert cost(groups) <= cost(runs)


def test_a_gap_is_bridged_only_while_that_costs_less_than_a_call():
    def made(*rows, width):
        found = boxes([share(row, width) for row in rows], limits(call_cost=4))
        return [(box.first, box.last) for box in found]

    assert made(0, 5, width=1) == [(0, 5)]
    assert made(0, 6, width=1) == [(0, 0), (6, 6)]
    assert made(0, 3, 4, width=2) == [(0, 4)]
    assert made(0, 3, 4, width=4) == [(0, 0), (3, 4)]


@given(width=st.integers(1, 40), data=st.data(), most=st.integers(1, 12), most_logits=st.integers(1, 12))
def test_a_share_is_cut_into_consecutive_ones_that_fit(width, data, most, most_logits):
    wanted = data.draw(st.integers(0, width))
    whole = Share(0, 7, list(range(width)), range(100, 100 + wanted))
    parts = list(split(whole, limits(max_tokens=most, max_logit_rows=most_logits)))
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert [place for part in parts for place in part.places] == list(whole.places)
    for part in parts:
        assert part.start - 7 == part.token_ids[0] and 1 <= part.width <= most and len(part.places) <= most_logits
        last = [100 + token - (width - wanted) for token in part.token_ids if token >= width - wanted]
        assert list(part.places) == last, "logits are those of the part's last tokens"


def test_a_long_sequence_widens_the_view_and_its_end_narrows_it():
    subject = engine(views=(8, 16, 32, 64), num_slots=2)

    def seen(*sequences):
        subject.calls.clear()
        subject.step(sequences)
        return {call.cache_len for call in subject.calls}

    assert seen(SequenceStep([1] * 5, 0, [0])) == {8}
    assert seen(SequenceStep([1] * 30, 0, [1])) == {32}
    assert seen(SequenceStep([1], 5, [0])) == {32}, "slot 1 still holds 30 positions, which may be wanted again"
    assert seen(SequenceStep([1], 6, [0]), SequenceStep([1] * 2, 0, [1])) == {8}


@pytest.mark.parametrize(
    ("sequence", "words"),
    [
        (SequenceStep([1], 4, [9]), r"block_table must name one slot in \[0, 3\].*got \[9\]"),
        (SequenceStep([1], 4, [0, 1]), r"block_table must name one slot.*got \[0, 1\]"),
        (SequenceStep([1], 5, [0]), r"num_computed_tokens must be in \[0, 4\], what slot 0 holds, got 5"),
        (SequenceStep([], 4, [0], 0), r"token_ids must be 1 to 44 from position 4 on, got 0"),
        (SequenceStep([1] * 45, 4, [0]), r"token_ids must be 1 to 44 from position 4 on, got 45"),
        (SequenceStep([1], 4, [0], 2), r"num_logits must be in \[0, 1\], got 2"),
    ],
)
def test_a_step_that_would_read_or_overwrite_foreign_tokens_is_refused(sequence, words):
    subject = engine()
    subject.step([SequenceStep([1, 2, 3, 4], 0, [0])])
    with pytest.raises(EngineFailure, match=words):
        subject.step([sequence])


def test_two_sequences_cannot_have_one_slot():
    with pytest.raises(EngineFailure, match="no other sequence"):
        engine().step([SequenceStep([1], 0, [2]), SequenceStep([1], 0, [2])])


def test_a_slot_whose_copy_failed_holds_nothing():
    subject = engine()
    subject.step([SequenceStep([1, 2], 0, [0]), SequenceStep([3, 4], 0, [1])])
    subject.copy_rows = lambda *_: (_ for _ in ()).throw(EngineFailure("no"))
    with pytest.raises(EngineFailure, match="no"):
        subject.copy_blocks([(0, 1)])
    with pytest.raises(EngineFailure, match=r"num_computed_tokens must be in \[0, 0\]"):
        subject.step([SequenceStep([5], 2, [1])])


def test_a_cache_that_is_too_small_or_not_linear_is_refused_by_name():
    with pytest.raises(InvalidRequest, match="cache_len must be at least max_model_len 48 and the widest padding 16"):
        engine(views=(63,), widths=(16,))
    with pytest.raises(InvalidRequest, match="block_size must be max_model_len 48 for a linear KV cache, got 32"):
        SlotEngine(EngineSpec(VOCAB, CONTEXT, 32, 4), limits())
    assert cache_len_for(48, 16) == 64 and cache_len_for(49, 16) == 128

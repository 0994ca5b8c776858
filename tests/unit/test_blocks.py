"""The block manager: what is cached is found, the oldest is evicted first, and nothing is freed twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonforge.scheduling.blocks import BlockManager, hash_block, hash_blocks, hash_salt


@pytest.fixture
def blocks():
    return BlockManager(num_blocks=4, block_size=2)


def test_a_hash_covers_all_tokens_before_it():
    first, second = hash_blocks([1, 2, 3, 4], 2)
    assert hash_blocks([9, 2, 3, 4], 2)[1] != second, "the same block after another prefix is another block"
    assert hash_blocks([1, 2, 3, 4, 5], 2) == [first, second], "an unfinished block has no hash"
    assert second == hash_block(first, [3, 4])


def test_a_salt_changes_every_hash_of_a_prompt():
    plain, mine, yours = (hash_blocks([1, 2, 3, 4], 2, hash_salt(salt)) for salt in ("", "mine", "yours"))
    assert len({*plain, *mine, *yours}) == 6
    assert plain == hash_blocks([1, 2, 3, 4], 2)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 9))
def test_hashes_of_a_prefix_are_a_prefix_of_the_hashes(tokens, size):
    hashes = hash_blocks(tokens, size)
    assert len(hashes) == len(tokens) // size
    assert hash_blocks(tokens[: len(tokens) // 2], size) == hashes[: len(tokens) // 2 // size]


def test_a_published_block_is_found_while_held_and_after_its_release(blocks):
    [first, second] = hash_blocks([1, 2, 3, 4], 2)
    table = blocks.allocate(2)
    held = list(table)
    blocks.publish(held[0], first)
    assert blocks.cached_prefix([first, second]) == held[:1]
    blocks.release(table)
    assert table == [] and blocks.num_free == 4
    assert blocks.cached_prefix([first, second]) == held[:1]
    blocks.take(held[:1])
    assert blocks.num_free == 3
    blocks.check_invariants([held[:1]])


def test_the_block_that_was_free_for_longest_is_evicted_first(blocks):
    hashes = hash_blocks(range(8), 2)
    table = blocks.allocate(4)
    for block, block_hash in zip(table, hashes, strict=True):
        blocks.publish(block, block_hash)
    blocks.release(table)  # from its end: the last block of the prompt is the oldest free one
    blocks.allocate(1)
    assert len(blocks.cached_prefix(hashes)) == 3
    blocks.allocate(2)
    assert len(blocks.cached_prefix(hashes)) == 1


def test_taking_a_free_cached_block_needs_room_for_it_too(blocks):
    [block_hash] = hash_blocks([1, 2], 2)
    table = blocks.allocate(1)
    blocks.publish(table[0], block_hash)
    blocks.release(table)
    cached = blocks.cached_prefix([block_hash])
    assert blocks.can_take(cached, 3)
    assert not blocks.can_take(cached, 4)


def test_of_two_equal_blocks_the_first_stays_published(blocks):
    [block_hash] = hash_blocks([1, 2], 2)
    first, second = blocks.allocate(2)
    blocks.publish(first, block_hash)
    blocks.publish(second, block_hash)
    assert blocks.cached_prefix([block_hash]) == [first]
    blocks.check_invariants([[first, second]])


def test_a_table_can_be_cut_to_its_first_blocks(blocks):
    table = blocks.allocate(3)
    first = table[0]
    blocks.release(table, keep=1)
    assert table == [first] and blocks.num_free == 3 and blocks.usage == 0.25
    blocks.check_invariants([table])


def test_shared_blocks_would_not_become_free(blocks):
    table = blocks.allocate(3)
    blocks.take(table[:1])
    assert blocks.num_unshared(table) == 2


def test_freeing_twice_is_a_bug_that_is_caught(blocks):
    [block] = blocks.allocate(1)
    blocks.release([block])
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.release([block])

"""The pool of blocks against a naive one: lists that are searched, and what was really written into each block."""

from __future__ import annotations

import random
import time

import pytest
import tiers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nucleate.engine.kv_cache import START, KVCacheManager, PrefixHit


class Sequence:
    """A user of blocks, as the scheduler is one: what it has read is in its blocks."""

    def __init__(self, tokens: list[int], blocks: list[int], node: int, read: int) -> None:
        self.tokens, self.blocks, self.node, self.read = tokens, blocks, node, read
        self.sealed = len(blocks)


class Twin:
    """A pool, sequences that use it, and the same said slowly."""

    def __init__(self, count: int, size: int, *, sharing: bool) -> None:
        self.pool = KVCacheManager(count, size, prefix_caching=sharing)
        self.written: list[tuple[int, ...]] = [()] * count  # all tokens up to the end of each block
        self.found: list[tuple[int, int, int, tuple[int, ...]]] = []  # block, node, the node before, tokens
        self.kept: list[int] = []
        self.nodes = {START: ()}
        self.sequences: list[Sequence] = []

    def users(self, block: int) -> list[Sequence]:
        return [sequence for sequence in self.sequences if block in sequence.blocks]

    def open(self, tokens: list[int]) -> Sequence | None:
        """Begin a sequence with what is there of it and new blocks for the rest, or not at all."""
        size, sharing = self.pool.block_size, self.pool.prefix_caching
        expected, node = [], START
        while (len(expected) + 1) * size < len(tokens):
            part = tuple(tokens[len(expected) * size : (len(expected) + 1) * size])
            hits = [(block, own) for block, own, before, held in self.found if (before, held) == (node, part)]
            assert len(hits) <= 1
            if not hits:
                break
            expected.append(hits[0][0])
            node = hits[0][1]
        shared = self.pool.match_prefix(tokens)
        assert shared == PrefixHit(expected, node)
        assert sharing or shared == ([], START)
        self.kept = [block for block in self.kept if block not in expected]
        sequence = Sequence(tokens, shared.block_ids, shared.node, len(shared.block_ids) * size)
        for end, block in enumerate(shared.block_ids, 1):
            assert self.written[block] == tuple(tokens[: end * size])
        self.sequences.append(sequence)
        if not self.grow(sequence):
            self.close(sequence)
            return None
        return sequence

    def fork(self, sequence: Sequence) -> None:
        """Another sequence with all that one has read: in the same blocks, but for a last one that is not full."""
        full, rest = divmod(sequence.read, self.pool.block_size)
        shared = sequence.blocks[:full]
        self.pool.add_reference(shared)
        child = Sequence(list(sequence.tokens), list(shared), sequence.node, sequence.read)
        self.sequences.append(child)
        if not self.grow(child):
            self.close(child)
        elif rest:
            assert self.users(child.blocks[full]) == [child]
            self.written[child.blocks[full]] = self.written[sequence.blocks[full]]

    def grow(self, sequence: Sequence) -> bool:
        """Blocks for all tokens: free ones, or else those that are out of use longest."""
        count = self.pool.blocks_needed(len(sequence.tokens)) - len(sequence.blocks)
        unused = [block for block in range(self.pool.num_blocks) if not self.users(block)]
        free = [block for block in unused if block not in self.kept]
        taken = self.pool.allocate(count)
        if count > len(unused):
            assert taken is None
            return False
        assert taken is not None
        assert len(set(taken)) == len(taken) == count
        gone = self.kept[: max(0, count - len(free))]
        assert set(taken) - set(gone) <= set(free)
        assert set(gone) <= set(taken)
        self.kept = self.kept[len(gone) :]
        self.found = [entry for entry in self.found if entry[0] not in gone]
        for block in taken:
            assert not self.users(block)
            self.written[block] = (-1,) * self.pool.block_size
        sequence.blocks += taken
        return True

    def read(self, sequence: Sequence, count: int) -> None:
        """Write tokens into blocks and seal those that are full."""
        size = self.pool.block_size
        for at in range(sequence.read, min(sequence.read + count, len(sequence.tokens))):
            block = sequence.blocks[at // size]
            assert self.users(block) == [sequence]
            self.written[block] = tuple(sequence.tokens[: at + 1])
            sequence.read = at + 1
            if sequence.read % size:
                continue
            part, before = self.written[block][-size:], sequence.node
            sequence.node = self.pool.cache_block(block, before, list(part))
            if not self.pool.prefix_caching:
                assert sequence.node == START
                continue
            hits = [own for _, own, node, held in self.found if (node, held) == (before, part)]
            assert [sequence.node] == hits or not hits
            if not hits:
                assert sequence.node not in self.nodes  # never used for two beginnings
                self.nodes[sequence.node] = self.nodes[before] + part
                self.found.append((block, sequence.node, before, part))

    def close(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.pool.free(sequence.blocks)
        sealed = {block for block, *_ in self.found}
        for block in reversed(sequence.blocks):
            if not self.users(block) and block in sealed:
                self.kept.append(block)

    def check(self) -> None:
        pool = self.pool
        used = {block for sequence in self.sequences for block in sequence.blocks}
        assert pool.num_used_blocks == len(used)
        assert pool.num_free_blocks == pool.num_blocks - len(used)
        assert list(pool._evictable) == self.kept
        assert len(pool._free) + len(self.kept) + len(used) == pool.num_blocks
        assert {*pool._free, *self.kept, *used} == set(range(pool.num_blocks))
        assert pool._ref_counts == [len(self.users(block)) for block in range(pool.num_blocks)]
        assert len(pool._keys) == len(pool._cached) == len(self.found) <= pool.num_blocks
        for block, own, _, _ in self.found:
            assert self.written[block] == self.nodes[own]
            assert pool._cached[pool._keys[block]] == (block, own)


class PoolMachine(RuleBasedStateMachine):
    @initialize(count=st.integers(1, 9), size=st.sampled_from((1, 2, 3)), sharing=st.sampled_from((True, True, False)))
    def make(self, count: int, size: int, sharing: bool) -> None:
        self.twin = Twin(count, size, sharing=sharing)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def open(self, tokens: list[int]) -> None:
        self.twin.open(tokens)

    @precondition(lambda self: self.twin.sequences)
    @rule(data=st.data(), count=st.integers(1, 12))
    def read(self, data: st.DataObject, count: int) -> None:
        self.twin.read(data.draw(st.sampled_from(self.twin.sequences)), count)

    @precondition(lambda self: self.twin.sequences)
    @rule(data=st.data(), token=st.integers(0, 1))
    def push(self, data: st.DataObject, token: int) -> None:
        sequence = data.draw(st.sampled_from(self.twin.sequences))
        sequence.tokens.append(token)
        if not self.twin.grow(sequence):
            sequence.tokens.pop()

    @precondition(lambda self: self.twin.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.twin.fork(data.draw(st.sampled_from(self.twin.sequences)))

    @precondition(lambda self: self.twin.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.twin.close(data.draw(st.sampled_from(self.twin.sequences)))

    @invariant()
    def check(self) -> None:
        if hasattr(self, "twin"):
            self.twin.check()

    def teardown(self) -> None:
        if hasattr(self, "twin"):
            for sequence in list(self.twin.sequences):
                self.twin.close(sequence)
            self.twin.check()
            assert self.twin.pool.num_free_blocks == self.twin.pool.num_blocks


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=tiers.count(15, 60), stateful_step_count=40, deadline=None)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("count", "size", "sharing"), [(1, 1, True), (7, 3, True), (40, 1, True), (30, 16, True), (9, 3, False)]
)
def test_ten_thousand_operations(count: int, size: int, sharing: bool) -> None:
    rng = random.Random(count * size)
    twin = Twin(count, size, sharing=sharing)
    stems = [[rng.randrange(2) for _ in range(count * size)] for _ in range(2)]
    for _ in range(10_000):
        choice, sequences = rng.random(), twin.sequences
        if choice < 0.25 or not sequences:
            stem = rng.choice(stems)[: rng.randrange(1, count * size + 1)]
            twin.open([*stem, *[rng.randrange(2) for _ in range(rng.randrange(3))]])
        elif choice < 0.6:
            twin.read(rng.choice(sequences), rng.randrange(1, 2 * size + 1))
        elif choice < 0.75:
            sequence = rng.choice(sequences)
            sequence.tokens.append(rng.randrange(2))
            if not twin.grow(sequence):
                sequence.tokens.pop()
        elif choice < 0.83:
            twin.fork(rng.choice(sequences))
        else:
            twin.close(rng.choice(sequences))
        twin.check()
    while twin.sequences:
        twin.close(twin.sequences[0])
    twin.check()
    assert twin.pool.num_free_blocks == count


@pytest.mark.parametrize(("count", "size"), [(0, 1), (1, 0), (-3, 4), (4, -1)])
def test_a_pool_without_a_block_or_blocks_without_a_token(count: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"must be at least 1, got {count} and {size}"):
        KVCacheManager(count, size)


def test_blocks_for_rounds_up() -> None:
    pool = KVCacheManager(1, 3)
    assert [pool.blocks_needed(tokens) for tokens in range(8)] == [0, 1, 1, 1, 2, 2, 2, 3]


def test_none_are_taken_when_there_are_too_few() -> None:
    pool = KVCacheManager(3, 2)
    assert pool.allocate(4) is None
    assert (pool.num_free_blocks, pool.num_used_blocks) == (3, 0)
    assert sorted(pool.allocate(3) or []) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_the_last_token_is_never_shared() -> None:
    """It has to be read: its logits are those of the next."""
    pool = KVCacheManager(4, 2)
    first, second = pool.allocate(2) or []
    node = pool.cache_block(first, START, (1, 2))
    last = pool.cache_block(second, node, (3, 4))
    assert pool.match_prefix([1, 2, 3, 4]) == ([first], node)
    assert pool.match_prefix([1, 2]) == pool.match_prefix([1]) == pool.match_prefix([]) == ([], START)
    assert pool.match_prefix([1, 2, 3, 4, 5]) == ([first, second], last)


def test_a_beginning_is_the_tokens_in_their_place() -> None:
    """Neither the same tokens after others, nor others with the same digest: hash(-1) == hash(-2)."""
    pool = KVCacheManager(4, 1)
    first, second = pool.allocate(2) or []
    assert hash((-1,)) == hash((-2,))
    node = pool.cache_block(first, START, [-1])
    pool.cache_block(second, node, [5])
    assert pool.match_prefix([-2, 0]).block_ids == pool.match_prefix([5, 0]).block_ids == []
    assert pool.match_prefix([-1, 5, 0]).block_ids == [first, second]


def test_the_end_of_a_beginning_is_given_away_first() -> None:
    pool = KVCacheManager(4, 1)
    blocks = pool.allocate(4) or []
    node = START
    for token, block in enumerate(blocks):
        node = pool.cache_block(block, node, [token])
    pool.free(blocks)
    assert pool.allocate(1) == blocks[3:]
    assert pool.match_prefix(range(5)).block_ids == blocks[:3]


def test_what_is_out_of_use_longest_is_given_away_first() -> None:
    pool = KVCacheManager(3, 1)
    blocks = pool.allocate(3) or []
    for block in blocks:
        pool.cache_block(block, START, [block])
    for block in blocks:
        pool.free([block])
    pool.free(pool.match_prefix([blocks[0], 9]).block_ids)  # used once more
    assert pool.allocate(2) == blocks[1:]
    assert pool.match_prefix([blocks[0], 9]).block_ids == blocks[:1]


def test_a_beginning_whose_start_is_gone_is_not_found_after_another_start() -> None:
    """A second sequence reads the same start into a block of its own; only the first one's can be found."""
    pool = KVCacheManager(4, 1)
    (first,) = pool.allocate(1) or []
    own, child = pool.allocate(2) or []
    node = pool.cache_block(first, START, [1])
    assert pool.cache_block(own, START, [1]) == node
    pool.cache_block(child, node, [2])
    pool.free([first])
    assert len(pool.allocate(2) or []) == 2  # the start of the first is given away
    assert pool.match_prefix([1, 2, 3]) == ([], START)
    pool.free([own, child])
    (again,) = pool.allocate(1) or []
    assert again == own
    assert pool.cache_block(again, START, [7]) not in {START, node}
    assert pool.match_prefix([7, 2, 3]).block_ids == [again]


def test_without_sharing_nothing_is_kept() -> None:
    pool = KVCacheManager(2, 1, prefix_caching=False)
    blocks = pool.allocate(2) or []
    assert pool.cache_block(blocks[0], START, [1]) == START
    pool.free(blocks)
    assert pool.match_prefix([1, 2]) == ([], START)
    assert not pool._evictable
    assert not pool._cached


def test_a_large_pool_that_is_full_of_beginnings_gives_them_away_fast() -> None:
    count = 120_000
    pool = KVCacheManager(count, 1)
    node = START
    blocks = pool.allocate(count) or []
    for token, block in enumerate(blocks):
        node = pool.cache_block(block, node, [token])
    pool.free(blocks)
    began = time.thread_time()
    for _ in range(count):
        assert pool.allocate(1)
    assert time.thread_time() - began < 2.0  # 0.2 s; a search from the first on takes 9

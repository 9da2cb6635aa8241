"""``KVCacheManager`` against a naive implementation that stores the contents of each block."""

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
    """A sequence with its blocks, as in the scheduler."""

    def __init__(self, tokens: list[int], blocks: list[int], node: int, read: int) -> None:
        self.tokens, self.blocks, self.node, self.read = tokens, blocks, node, read
        self.sealed = len(blocks)


class ReferencePool:
    """A KV cache manager, the sequences that use it, and a naive implementation of the same."""

    def __init__(self, count: int, size: int, *, sharing: bool) -> None:
        self.pool = KVCacheManager(count, size, prefix_caching=sharing)
        self.written: list[tuple[int, ...]] = [()] * count  # all tokens up to the end of each block
        self.found: list[tuple[int, int, int, tuple[int, ...]]] = []  # block, node, parent node, tokens
        self.evictable: list[int] = []
        self.nodes = {START: ()}
        self.sequences: list[Sequence] = []

    def users(self, block: int) -> list[Sequence]:
        return [sequence for sequence in self.sequences if block in sequence.blocks]

    def open(self, tokens: list[int]) -> Sequence | None:
        """Start a sequence with cached blocks and new ones for the rest, if there are enough."""
        size, sharing = self.pool.block_size, self.pool.prefix_caching
        expected, node = [], START
        while (len(expected) + 1) * size < len(tokens):
            part = tuple(tokens[len(expected) * size : (len(expected) + 1) * size])
            hits = [(block, own) for block, own, before, key in self.found if (before, key) == (node, part)]
            assert len(hits) <= 1
            if not hits:
                break
            expected.append(hits[0][0])
            node = hits[0][1]
        shared = self.pool.match_prefix(tokens)
        assert shared == PrefixHit(expected, node)
        assert sharing or shared == ([], START)
        self.evictable = [block for block in self.evictable if block not in expected]
        sequence = Sequence(tokens, shared.block_ids, shared.node, len(shared.block_ids) * size)
        for end, block in enumerate(shared.block_ids, 1):
            assert self.written[block] == tuple(tokens[: end * size])
        self.sequences.append(sequence)
        if not self.grow(sequence):
            self.close(sequence)
            return None
        return sequence

    def fork(self, sequence: Sequence) -> None:
        """Fork a sequence: full blocks are shared, a last partial block is copied."""
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
        """Allocate blocks for all tokens: free ones first, then evicted ones in LRU order."""
        count = self.pool.blocks_needed(len(sequence.tokens)) - len(sequence.blocks)
        unused = [block for block in range(self.pool.num_blocks) if not self.users(block)]
        free = [block for block in unused if block not in self.evictable]
        allocated = self.pool.allocate(count)
        if count > len(unused):
            assert allocated is None
            return False
        assert allocated is not None
        assert len(set(allocated)) == len(allocated) == count
        evicted = self.evictable[: max(0, count - len(free))]
        assert set(allocated) - set(evicted) <= set(free)
        assert set(evicted) <= set(allocated)
        self.evictable = self.evictable[len(evicted) :]
        self.found = [entry for entry in self.found if entry[0] not in evicted]
        for block in allocated:
            assert not self.users(block)
            self.written[block] = (-1,) * self.pool.block_size
        sequence.blocks += allocated
        return True

    def read(self, sequence: Sequence, count: int) -> None:
        """Compute tokens and cache full blocks."""
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
            hits = [own for _, own, node, key in self.found if (node, key) == (before, part)]
            assert [sequence.node] == hits or not hits
            if not hits:
                assert sequence.node not in self.nodes  # a node is one prefix
                self.nodes[sequence.node] = self.nodes[before] + part
                self.found.append((block, sequence.node, before, part))

    def close(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.pool.free(sequence.blocks)
        sealed = {block for block, *_ in self.found}
        for block in reversed(sequence.blocks):
            if not self.users(block) and block in sealed:
                self.evictable.append(block)

    def check(self) -> None:
        pool = self.pool
        used = {block for sequence in self.sequences for block in sequence.blocks}
        assert pool.num_used_blocks == len(used)
        assert pool.num_free_blocks == pool.num_blocks - len(used)
        assert list(pool._evictable) == self.evictable
        assert len(pool._free) + len(self.evictable) + len(used) == pool.num_blocks
        assert {*pool._free, *self.evictable, *used} == set(range(pool.num_blocks))
        assert pool._ref_counts == [len(self.users(block)) for block in range(pool.num_blocks)]
        assert len(pool._keys) == len(pool._cached) == len(self.found) <= pool.num_blocks
        for block, own, _, _ in self.found:
            assert self.written[block] == self.nodes[own]
            assert pool._cached[pool._keys[block]] == (block, own)


class PoolMachine(RuleBasedStateMachine):
    @initialize(count=st.integers(1, 9), size=st.sampled_from((1, 2, 3)), sharing=st.sampled_from((True, True, False)))
    def make(self, count: int, size: int, sharing: bool) -> None:
        self.reference = ReferencePool(count, size, sharing=sharing)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def open(self, tokens: list[int]) -> None:
        self.reference.open(tokens)

    @precondition(lambda self: self.reference.sequences)
    @rule(data=st.data(), count=st.integers(1, 12))
    def read(self, data: st.DataObject, count: int) -> None:
        self.reference.read(data.draw(st.sampled_from(self.reference.sequences)), count)

    @precondition(lambda self: self.reference.sequences)
    @rule(data=st.data(), token=st.integers(0, 1))
    def push(self, data: st.DataObject, token: int) -> None:
        sequence = data.draw(st.sampled_from(self.reference.sequences))
        sequence.tokens.append(token)
        if not self.reference.grow(sequence):
            sequence.tokens.pop()

    @precondition(lambda self: self.reference.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.reference.fork(data.draw(st.sampled_from(self.reference.sequences)))

    @precondition(lambda self: self.reference.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.reference.close(data.draw(st.sampled_from(self.reference.sequences)))

    @invariant()
    def check(self) -> None:
        if hasattr(self, "reference"):
            self.reference.check()

    def teardown(self) -> None:
        if hasattr(self, "reference"):
            for sequence in list(self.reference.sequences):
                self.reference.close(sequence)
            self.reference.check()
            assert self.reference.pool.num_free_blocks == self.reference.pool.num_blocks


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=tiers.count(15, 60), stateful_step_count=40, deadline=None)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("count", "size", "sharing"), [(1, 1, True), (7, 3, True), (40, 1, True), (30, 16, True), (9, 3, False)]
)
def test_ten_thousand_operations(count: int, size: int, sharing: bool) -> None:
    rng = random.Random(count * size)
    reference = ReferencePool(count, size, sharing=sharing)
    stems = [[rng.randrange(2) for _ in range(count * size)] for _ in range(2)]
    for _ in range(10_000):
        choice, sequences = rng.random(), reference.sequences
        if choice < 0.25 or not sequences:
            stem = rng.choice(stems)[: rng.randrange(1, count * size + 1)]
            reference.open([*stem, *[rng.randrange(2) for _ in range(rng.randrange(3))]])
        elif choice < 0.6:
            reference.read(rng.choice(sequences), rng.randrange(1, 2 * size + 1))
        elif choice < 0.75:
            sequence = rng.choice(sequences)
            sequence.tokens.append(rng.randrange(2))
            if not reference.grow(sequence):
                sequence.tokens.pop()
        elif choice < 0.83:
            reference.fork(rng.choice(sequences))
        else:
            reference.close(rng.choice(sequences))
        reference.check()
    while reference.sequences:
        reference.close(reference.sequences[0])
    reference.check()
    assert reference.pool.num_free_blocks == count


@pytest.mark.parametrize(("count", "size"), [(0, 1), (1, 0), (-3, 4), (4, -1)])
def test_invalid_pool_sizes(count: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"must be at least 1, got {count} and {size}"):
        KVCacheManager(count, size)


def test_blocks_needed_rounds_up() -> None:
    pool = KVCacheManager(1, 3)
    assert [pool.blocks_needed(tokens) for tokens in range(8)] == [0, 1, 1, 1, 2, 2, 2, 3]


def test_allocation_takes_all_or_nothing() -> None:
    pool = KVCacheManager(3, 2)
    assert pool.allocate(4) is None
    assert (pool.num_free_blocks, pool.num_used_blocks) == (3, 0)
    assert sorted(pool.allocate(3) or []) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_the_last_token_is_never_shared() -> None:
    """It must be computed, as its logits are needed."""
    pool = KVCacheManager(4, 2)
    first, second = pool.allocate(2) or []
    node = pool.cache_block(first, START, (1, 2))
    last = pool.cache_block(second, node, (3, 4))
    assert pool.match_prefix([1, 2, 3, 4]) == ([first], node)
    assert pool.match_prefix([1, 2]) == pool.match_prefix([1]) == pool.match_prefix([]) == ([], START)
    assert pool.match_prefix([1, 2, 3, 4, 5]) == ([first, second], last)


def test_a_prefix_is_identified_by_its_tokens_and_position() -> None:
    """Neither the same tokens after others, nor others with the same digest: hash(-1) == hash(-2)."""
    pool = KVCacheManager(4, 1)
    first, second = pool.allocate(2) or []
    assert hash((-1,)) == hash((-2,))
    node = pool.cache_block(first, START, [-1])
    pool.cache_block(second, node, [5])
    assert pool.match_prefix([-2, 0]).block_ids == pool.match_prefix([5, 0]).block_ids == []
    assert pool.match_prefix([-1, 5, 0]).block_ids == [first, second]


def test_the_end_of_a_prefix_is_evicted_first() -> None:
    pool = KVCacheManager(4, 1)
    blocks = pool.allocate(4) or []
    node = START
    for token, block in enumerate(blocks):
        node = pool.cache_block(block, node, [token])
    pool.free(blocks)
    assert pool.allocate(1) == blocks[3:]
    assert pool.match_prefix(range(5)).block_ids == blocks[:3]


def test_eviction_is_least_recently_used_first() -> None:
    pool = KVCacheManager(3, 1)
    blocks = pool.allocate(3) or []
    for block in blocks:
        pool.cache_block(block, START, [block])
    for block in blocks:
        pool.free([block])
    pool.free(pool.match_prefix([blocks[0], 9]).block_ids)  # used once more
    assert pool.allocate(2) == blocks[1:]
    assert pool.match_prefix([blocks[0], 9]).block_ids == blocks[:1]


def test_a_block_whose_prefix_was_evicted_is_not_found() -> None:
    """A second sequence computes the same prefix into another block; only the first block is cached."""
    pool = KVCacheManager(4, 1)
    (first,) = pool.allocate(1) or []
    own, child = pool.allocate(2) or []
    node = pool.cache_block(first, START, [1])
    assert pool.cache_block(own, START, [1]) == node
    pool.cache_block(child, node, [2])
    pool.free([first])
    assert len(pool.allocate(2) or []) == 2  # the first block is evicted
    assert pool.match_prefix([1, 2, 3]) == ([], START)
    pool.free([own, child])
    (again,) = pool.allocate(1) or []
    assert again == own
    assert pool.cache_block(again, START, [7]) not in {START, node}
    assert pool.match_prefix([7, 2, 3]).block_ids == [again]


def test_without_prefix_caching_nothing_is_cached() -> None:
    pool = KVCacheManager(2, 1, prefix_caching=False)
    blocks = pool.allocate(2) or []
    assert pool.cache_block(blocks[0], START, [1]) == START
    pool.free(blocks)
    assert pool.match_prefix([1, 2]) == ([], START)
    assert not pool._evictable
    assert not pool._cached


def test_eviction_from_a_large_full_pool_is_fast() -> None:
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
    assert time.thread_time() - began < 2.0  # 0.2 s; a linear search takes 9

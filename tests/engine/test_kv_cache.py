"""``KVCacheManager`` against a naive implementation that stores the contents of each block."""

from __future__ import annotations

import random
import time

import pytest
import tiers

from nucleate.engine.kv_cache import MAX_COMPARED, START, KVCacheManager, PrefixHit


class Sequence:
    """A sequence with its blocks, as in the scheduler."""

    def __init__(self, tokens: list[int], blocks: list[int], node: int, read: int) -> None:
        self.tokens, self.blocks, self.node, self.read = tokens, blocks, node, read
        self.sealed = len(blocks)


class ReferencePool:
    """A KV cache manager, the sequences that use it, and a naive implementation of the same."""

    def __init__(self, count: int, size: int, *, sharing: bool, copies: bool = False) -> None:
        self.pool = KVCacheManager(count, size, prefix_caching=sharing, copies=copies)
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
        assert shared[:2] == (expected, node)
        assert sharing or shared == PrefixHit([], START)
        copied, count = self.partial(tokens, shared)
        self.evictable = [block for block in self.evictable if block not in expected]
        sequence = Sequence(tokens, shared.block_ids, shared.node, len(shared.block_ids) * size)
        for end, block in enumerate(shared.block_ids, 1):
            assert self.written[block] == tuple(tokens[: end * size])
        self.sequences.append(sequence)
        if not self.grow(sequence):
            self.close(sequence)
            return None
        if count:
            self.written[sequence.blocks[len(expected)]] = copied
            sequence.read += count
        return sequence

    def partial(self, tokens: list[int], shared: PrefixHit) -> tuple[tuple[int, ...], int]:
        """The contents of the block to copy, and how many of its tokens continue the prefix: the most there are."""
        start = len(shared.block_ids) * self.pool.block_size
        rest = tokens[start : start + self.pool.block_size][: len(tokens) - 1 - start] if self.pool.copies else []
        same = {}
        for block, _, before, part in self.found:
            if before == shared.node:
                pairs = enumerate(zip(part, rest, strict=False))
                same[block] = next((at for at, (own, other) in pairs if own != other), min(len(part), len(rest)))
        most = max(same.values(), default=0)
        if not most:
            assert shared.partial is None
            return (), 0
        block, count = shared.partial or (-1, 0)
        recent = [one for one, *_ in self.found if same.get(one)][-MAX_COMPARED:]
        assert same[block] == count == max(same[one] for one in recent)
        if block in self.evictable:
            self.evictable.remove(block)
            self.evictable.append(block)
        assert self.written[block][: start + count] == tuple(tokens[: start + count])
        return self.written[block], count

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
            sequence.node = self.keep(sequence, block, self.written[block][-size:])

    def keep(self, sequence: Sequence, block: int, part: tuple[int, ...]) -> int:
        """Put a block of a sequence into the prefix cache."""
        before = sequence.node
        own = self.pool.cache_block(block, before, list(part))
        if not self.pool.prefix_caching:
            assert own == START
            return own
        hits = [other for _, other, node, key in self.found if (node, key) == (before, part)]
        assert [own] == hits or not hits
        if not hits:
            assert own not in self.nodes  # a node is one prefix
            self.nodes[own] = self.nodes[before] + part
            self.found.append((block, own, before, part))
        return own

    def close(self, sequence: Sequence) -> None:
        full, rest = divmod(sequence.read, self.pool.block_size)
        if rest and self.pool.copies and len(sequence.blocks) > full:
            self.keep(sequence, sequence.blocks[full], tuple(sequence.tokens[sequence.read - rest : sequence.read]))
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
            assert self.written[block][: len(self.nodes[own])] == self.nodes[own]
            assert pool._cached[pool._keys[block]] == (block, own)


@pytest.mark.parametrize(
    ("count", "size", "sharing"),
    [(1, 1, True), (3, 2, True), (7, 3, True), (5, 1, False), (9, 3, False), (40, 1, True), (30, 16, True)],
)
@pytest.mark.parametrize("copies", [False, True])
def test_random_operations(count: int, size: int, sharing: bool, copies: bool) -> None:
    rng = random.Random(count * size)
    reference = ReferencePool(count, size, sharing=sharing, copies=copies)
    stems = [[rng.randrange(2) for _ in range(count * size)] for _ in range(2)]
    for _ in range(tiers.count(1000, 10_000)):
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


def test_blocks_needed_rounds_up() -> None:
    pool = KVCacheManager(1, 3)
    assert [pool.blocks_needed(tokens) for tokens in range(8)] == [0, 1, 1, 1, 2, 2, 2, 3]


def test_a_prefix_is_identified_by_its_tokens_and_position() -> None:
    """Neither the same tokens after others, nor others with the same digest: hash(-1) == hash(-2)."""
    pool = KVCacheManager(4, 1)
    first, second = pool.allocate(2) or []
    assert hash((-1,)) == hash((-2,))
    node = pool.cache_block(first, START, [-1])
    pool.cache_block(second, node, [5])
    assert pool.match_prefix([-2, 0]).block_ids == pool.match_prefix([5, 0]).block_ids == []
    assert pool.match_prefix([-1, 5, 0]).block_ids == [first, second]


@pytest.mark.slow
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

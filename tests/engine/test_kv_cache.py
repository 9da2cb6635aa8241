"""The pool of blocks against a naive one: lists that are searched, and what was really written into each block."""

from __future__ import annotations

import random
import time

import pytest
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
        self.pool = KVCacheManager(count, size, sharing=sharing)
        self.written: list[tuple[int, ...]] = [()] * count  # all tokens up to the end of each block
        self.found: list[tuple[int, int, int, tuple[int, ...]]] = []  # block, node, the node before, tokens
        self.kept: list[int] = []
        self.nodes = {START: ()}
        self.sequences: list[Sequence] = []

    def users(self, block: int) -> list[Sequence]:
        return [sequence for sequence in self.sequences if block in sequence.blocks]

    def open(self, tokens: list[int]) -> Sequence | None:
        """Begin a sequence with what is there of it and new blocks for the rest, or not at all."""
        size, sharing = self.pool.block_size, self.pool.sharing
        expected, node = [], START
        while (len(expected) + 1) * size < len(tokens):
            part = tuple(tokens[len(expected) * size : (len(expected) + 1) * size])
            hits = [(block, own) for block, own, before, held in self.found if (before, held) == (node, part)]
            assert len(hits) <= 1
            if not hits:
                break
            expected.append(hits[0][0])
            node = hits[0][1]
        shared = self.pool.share(tokens)
        assert shared == PrefixHit(expected, node)
        assert sharing or shared == ([], START)
        self.kept = [block for block in self.kept if block not in expected]
        sequence = Sequence(tokens, shared.blocks, shared.node, len(shared.blocks) * size)
        for end, block in enumerate(shared.blocks, 1):
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
        self.pool.join(shared)
        child = Sequence(list(sequence.tokens), list(shared), sequence.node, sequence.read)
        self.sequences.append(child)
        if not self.grow(child):
            self.close(child)
        elif rest:
            assert self.users(child.blocks[full]) == [child]
            self.written[child.blocks[full]] = self.written[sequence.blocks[full]]

    def grow(self, sequence: Sequence) -> bool:
        """Blocks for all tokens: free ones, or else those that are out of use longest."""
        count = self.pool.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        unused = [block for block in range(self.pool.count) if not self.users(block)]
        free = [block for block in unused if block not in self.kept]
        taken = self.pool.take(count)
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
            sequence.node = self.pool.seal(block, before, list(part))
            if not self.pool.sharing:
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
        self.pool.release(sequence.blocks)
        sealed = {block for block, *_ in self.found}
        for block in reversed(sequence.blocks):
            if not self.users(block) and block in sealed:
                self.kept.append(block)

    def check(self) -> None:
        pool = self.pool
        used = {block for sequence in self.sequences for block in sequence.blocks}
        assert pool.used == len(used)
        assert pool.available == pool.count - len(used)
        assert list(pool._kept) == self.kept
        assert len(pool._free) + len(self.kept) + len(used) == pool.count
        assert {*pool._free, *self.kept, *used} == set(range(pool.count))
        assert pool._users == [len(self.users(block)) for block in range(pool.count)]
        assert len(pool._places) == len(pool._sealed) == len(self.found) <= pool.count
        for block, own, _, _ in self.found:
            assert self.written[block] == self.nodes[own]
            assert pool._sealed[pool._places[block]] == (block, own)


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
            assert self.twin.pool.available == self.twin.pool.count


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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
    assert twin.pool.available == count


@pytest.mark.parametrize(("count", "size"), [(0, 1), (1, 0), (-3, 4), (4, -1)])
def test_a_pool_without_a_block_or_blocks_without_a_token(count: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"one or more blocks of one or more tokens, got {count} of {size}"):
        KVCacheManager(count, size)


def test_blocks_for_rounds_up() -> None:
    pool = KVCacheManager(1, 3)
    assert [pool.blocks_for(tokens) for tokens in range(8)] == [0, 1, 1, 1, 2, 2, 2, 3]


def test_none_are_taken_when_there_are_too_few() -> None:
    pool = KVCacheManager(3, 2)
    assert pool.take(4) is None
    assert (pool.available, pool.used) == (3, 0)
    assert sorted(pool.take(3) or []) == [0, 1, 2]
    assert pool.take(1) is None
    assert pool.take(0) == []


def test_the_last_token_is_never_shared() -> None:
    """It has to be read: its logits are those of the next."""
    pool = KVCacheManager(4, 2)
    first, second = pool.take(2) or []
    node = pool.seal(first, START, (1, 2))
    last = pool.seal(second, node, (3, 4))
    assert pool.share([1, 2, 3, 4]) == ([first], node)
    assert pool.share([1, 2]) == pool.share([1]) == pool.share([]) == ([], START)
    assert pool.share([1, 2, 3, 4, 5]) == ([first, second], last)


def test_a_beginning_is_the_tokens_in_their_place() -> None:
    """Neither the same tokens after others, nor others with the same digest: hash(-1) == hash(-2)."""
    pool = KVCacheManager(4, 1)
    first, second = pool.take(2) or []
    assert hash((-1,)) == hash((-2,))
    node = pool.seal(first, START, [-1])
    pool.seal(second, node, [5])
    assert pool.share([-2, 0]).blocks == pool.share([5, 0]).blocks == []
    assert pool.share([-1, 5, 0]).blocks == [first, second]


def test_the_end_of_a_beginning_is_given_away_first() -> None:
    pool = KVCacheManager(4, 1)
    blocks = pool.take(4) or []
    node = START
    for token, block in enumerate(blocks):
        node = pool.seal(block, node, [token])
    pool.release(blocks)
    assert pool.take(1) == blocks[3:]
    assert pool.share(range(5)).blocks == blocks[:3]


def test_what_is_out_of_use_longest_is_given_away_first() -> None:
    pool = KVCacheManager(3, 1)
    blocks = pool.take(3) or []
    for block in blocks:
        pool.seal(block, START, [block])
    for block in blocks:
        pool.release([block])
    pool.release(pool.share([blocks[0], 9]).blocks)  # used once more
    assert pool.take(2) == blocks[1:]
    assert pool.share([blocks[0], 9]).blocks == blocks[:1]


def test_a_beginning_whose_start_is_gone_is_not_found_after_another_start() -> None:
    """A second sequence reads the same start into a block of its own; only the first one's can be found."""
    pool = KVCacheManager(4, 1)
    (first,) = pool.take(1) or []
    own, child = pool.take(2) or []
    node = pool.seal(first, START, [1])
    assert pool.seal(own, START, [1]) == node
    pool.seal(child, node, [2])
    pool.release([first])
    assert len(pool.take(2) or []) == 2  # the start of the first is given away
    assert pool.share([1, 2, 3]) == ([], START)
    pool.release([own, child])
    (again,) = pool.take(1) or []
    assert again == own
    assert pool.seal(again, START, [7]) not in {START, node}
    assert pool.share([7, 2, 3]).blocks == [again]


def test_without_sharing_nothing_is_kept() -> None:
    pool = KVCacheManager(2, 1, sharing=False)
    blocks = pool.take(2) or []
    assert pool.seal(blocks[0], START, [1]) == START
    pool.release(blocks)
    assert pool.share([1, 2]) == ([], START)
    assert not pool._kept
    assert not pool._sealed


def test_a_large_pool_that_is_full_of_beginnings_gives_them_away_fast() -> None:
    count = 120_000
    pool = KVCacheManager(count, 1)
    node = START
    blocks = pool.take(count) or []
    for token, block in enumerate(blocks):
        node = pool.seal(block, node, [token])
    pool.release(blocks)
    began = time.thread_time()
    for _ in range(count):
        assert pool.take(1)
    assert time.thread_time() - began < 2.0  # 0.2 s; a search from the first on takes 9

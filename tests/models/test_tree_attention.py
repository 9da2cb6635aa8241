"""Tree attention: each branch of a tree equals the same tokens as a chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import attended
from toy_models import PagedToy, Toy

from nucleate.models import cpu_operations
from nucleate.models.batched_llama import BatchedLlama, compiled
from nucleate.models.loader import runner_of
from nucleate.models.numpy_llama import Llama
from nucleate.models.paged_cache import (
    MAX_TREE_TOKENS,
    NO_SINKS,
    AttentionRule,
    BatchLayout,
    TreeMask,
    allocate_kv_cache,
    copy_slots,
    slots_of,
    token_major,
)
from nucleate.models.runner import ModelInput, Move, Runner


def random_parents(rng: np.random.Generator, count: int) -> list[int]:
    """A random tree: a chain, a star, or in between."""
    kind = rng.random()
    if kind < 0.15:
        return [-1] * count
    if kind < 0.3:
        return [*range(-1, count - 1)]
    return [int(rng.integers(-1, position)) if position else -1 for position in range(count)]


def path_to(parents: Sequence[int], position: int) -> list[int]:
    path = []
    while position >= 0:
        path.insert(0, position)
        position = parents[position]
    return path


TEXTS = st.tuples(st.integers(1, 60), st.integers(1, 4), st.integers(0, 20))
"""Tokens before a tree, how many of these are read with it, and tokens of the tree."""


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    group, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rule = AttentionRule(
        draw(st.sampled_from([0.125, 1.0])),
        draw(st.sampled_from([0, 0, 1, 2, 5, 17, 40])),
        draw(st.sampled_from([0.0, 0.0, 5.0])),
        np.linspace(-3, 3, group * kv_heads, dtype=np.float32) if draw(st.booleans()) else NO_SINKS,
    )
    return dict(
        rule=rule, kv_heads=kv_heads, heads=group * kv_heads, block_size=draw(st.sampled_from([16, 32])),
        texts=draw(st.lists(TEXTS, min_size=1, max_size=3)),
        seed=draw(st.integers(0, 2**20)), threads=draw(st.integers(1, 2)),
    )  # fmt: skip


@given(cases())
@settings(max_examples=tiers.count(12, 50))
def test_the_kernel_attends_along_branches(case: dict[str, Any]) -> None:
    """With inputs without a tree in the batch, and with no, one or some tokens before the tree."""
    rng, size = np.random.default_rng(case["seed"]), 16
    rule, kv_heads, heads, block_size = case["rule"], case["kv_heads"], case["heads"], case["block_size"]
    free = rng.permutation(40).tolist()
    pool = allocate_kv_cache(40, block_size, kv_heads, size, size)
    for array in pool:
        array[:] = np.nan
    keys, values = token_major(pool, size)
    parts, olds = [], []
    for key, (length, own, nodes) in enumerate(case["texts"]):
        start, stop = max(0, length - own), length + nodes
        table = [free.pop() for _ in range(-(-stop // block_size))]
        old = [rng.standard_normal((stop, kv_heads, size), np.float32) for _ in range(2)]
        for position in range(start):
            keys[table[position // block_size], :, position % block_size] = old[0][position]
            values[table[position // block_size], :, position % block_size] = old[1][position]
        parents = random_parents(rng, nodes) if nodes else None
        if nodes > 4 and parents == [*range(-1, nodes - 1)]:
            parents[-1] = 0  # not a chain: long chains use another code path
        parts.append(ModelInput(key, [0] * stop, start, stop, table, 1, parents))
        olds.append(old)
    packing = BatchLayout(parts, block_size)
    assert len(packing.short) == len(parts)
    queries = rng.standard_normal((packing.size, heads, size), np.float32)
    new = [np.concatenate([old[i][part.start :] for old, part in zip(olds, parts, strict=True)]) for i in (0, 1)]
    out = np.full((packing.size, heads, size), 7, np.float32)
    before, cpu_operations.MIN_BYTES = cpu_operations.MIN_BYTES, 0
    try:
        cpu_operations.decode_attention(queries, *new, pool, packing, rule, out, case["threads"])
    finally:
        cpu_operations.MIN_BYTES = before
    at = 0
    for part, (old_keys, old_values) in zip(parts, olds, strict=True):
        parents, base = part.parents or [], part.stop - len(part.parents or [])
        for position in range(part.start, part.stop):
            seen = [*range(min(position + 1, base)), *[base + one for one in path_to(parents, position - base)]]
            right = attended(queries[at], old_keys[seen], old_values[seen], rule, len(seen))
            np.testing.assert_allclose(out[at], right, atol=3e-5, rtol=1e-4)
            assert packing.positions_T[at] == len(seen) - 1
            at += 1
        for stored, old in zip((keys, values), (old_keys, old_values), strict=True):  # in list order
            for position in range(part.stop):
                block = part.block_ids[position // block_size]
                np.testing.assert_array_equal(stored[block, :, position % block_size], old[position])


@given(st.integers(0, 30), st.integers(1, 30), st.integers(0, 2**20), st.sampled_from([0, 1, 3, 9]))
def test_a_node_attends_to_its_path(length: int, nodes: int, seed: int, window: int) -> None:
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, nodes)
    tree, start = TreeMask(parents, length + nodes), int(rng.integers(0, length + nodes))
    expected = np.zeros((length + nodes - start, length + nodes), bool)
    for position in range(start, length + nodes):
        seen = [*range(min(position + 1, length)), *[length + one for one in path_to(parents, position - length)]]
        expected[position - start, seen[-window:] if window else seen] = True
    np.testing.assert_array_equal(tree.mask(start, window), expected)


def test_chains_have_no_tree_mask() -> None:
    parts = [ModelInput(0, [1, 2, 3], 0, 3, [0], 3), ModelInput(1, [1, 2], 1, 2, [1], 1)]
    packing = BatchLayout(parts, 16)
    assert packing.tree_links_T2.shape == (0, 2)
    assert packing.positions_T is packing._indices_T
    large = ModelInput(2, [0] * 100, 9, 100, [*range(2, 9)], 1, [-1] * 90)
    mixed = BatchLayout([*parts, large], 16)
    assert len(mixed.long) == 1
    assert MAX_TREE_TOKENS < 91
    seen_before = ModelInput(3, [0] * 9, 8, 9, [2], 1, [-1, -1, 0])
    assert len(BatchLayout([seen_before], 16).long) == 1


# in models


BLOCKS = [*range(12)]


def logits(
    runner: Runner, ids: Sequence[int], start: int, num_logits: int, parents: Sequence[int] | None = None, key: int = 0
) -> Any:
    blocks = [block + 12 * key for block in BLOCKS]
    return np.array(runner.forward([ModelInput(key, list(ids), start, len(ids), blocks, num_logits, parents)]))


def tree_and_branches(make: Any, size: int, seed: int, nodes: int, chunk: int = 1) -> Any:
    """Logits of a tree's tokens and of a token after an accepted branch, from the tree and from chains."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, size, int(rng.integers(chunk + 1, 45))).tolist()
    tokens, parents = rng.integers(3, size, nodes).tolist(), random_parents(rng, nodes)
    if nodes > 1 and parents == [*range(-1, nodes - 1)]:
        parents[-1] = -1
    first, runner = len(ids) - chunk if chunk else 0, make()
    if first:
        logits(runner, ids[:first], 0, 0)
    ours = logits(runner, [*ids, *tokens], first, nodes + 1, parents)
    separate, reference = [], make()
    if first:
        logits(reference, ids[:first], 0, 0, key=1)
    paths = [path_to(parents, position) for position in range(nodes)]
    for path in [[], *paths]:
        separate.append(
            logits(reference, [*ids, *[tokens[position] for position in path]], first, len(path) + 1, key=1)[-1]
        )
    path = max(paths, key=lambda path: (path != [*range(len(path))], len(path)))  # a branch whose KV cache must move
    accepted = [*ids, *[tokens[position] for position in path], 7]
    runner.move([Move(0, BLOCKS, [len(ids) + position for position in path], len(ids))])
    logits(reference, accepted[:-1], first, 0, key=1)
    follows = [logits(each, accepted, len(accepted) - 1, 1, key=key)[0] for key, each in enumerate((runner, reference))]
    return [*ours, follows[0]], [*separate, follows[1]]


@pytest.mark.parametrize("seed", [0, 2, 3, 5, 6, 10])
def test_trees_of_the_embedded_model_are_bit_equal(seed: int, model: Llama) -> None:
    def make() -> BatchedLlama:
        runner = BatchedLlama(model, 8 << 20)
        runner.kernels = compiled()
        return runner

    ours, separate = tree_and_branches(make, 4096, seed, 1 + seed % 13)
    for mine, other in zip(ours, separate, strict=True):
        if seed < 7:  # the kernel computes chains of up to SHORT tokens
            np.testing.assert_array_equal(mine, other)
        else:
            np.testing.assert_allclose(mine, other, atol=2e-4)


@pytest.mark.parametrize(("nodes", "chunk"), [(15, 1), (40, 1), (5, 12), (5, 0)])
def test_large_trees_and_trees_after_a_prompt_chunk(nodes: int, chunk: int, model: Llama) -> None:
    ours, separate = tree_and_branches(lambda: BatchedLlama(model, 8 << 20), 4096, nodes, nodes, chunk)
    np.testing.assert_allclose(np.stack(ours), np.stack(separate), atol=2e-4)


@pytest.mark.parametrize("count", [1, 4, 7, 12])
def test_a_chain_given_as_a_tree(count: int, model: Llama) -> None:
    ids = np.random.default_rng(count).integers(3, 4096, 20 + count).tolist()
    found = []
    for parents in (None, range(-1, count - 1)):
        runner = BatchedLlama(model, 8 << 20)
        runner.capture_hidden_states((2, 6))
        logits(runner, ids[:19], 0, 0)
        found.append((logits(runner, ids, 19, count + 1, parents), runner.hidden_states))
    for chain, tree in zip(*found, strict=True):
        np.testing.assert_array_equal(chain, tree)


def test_a_tree_in_two_steps(model: Llama) -> None:
    """The KV cache of its first tokens is already stored."""
    rng = np.random.default_rng(3)
    ids, parents = rng.integers(3, 4096, 30).tolist(), [-1, -1, 0, 1, 3, 0, 2, 2]
    whole, parted = BatchedLlama(model, 8 << 20), BatchedLlama(model, 8 << 20)
    logits(whole, ids[:21], 0, 0)
    expected = logits(whole, ids, 21, 9, parents)
    logits(parted, ids[:21], 0, 0)
    logits(parted, ids[:25], 21, 4, parents[:3])
    for stop in (26, 29, 30):
        start = {26: 25, 29: 26, 30: 29}[stop]
        found = logits(parted, ids[:stop], start, stop - start, parents[: stop - 22])
        np.testing.assert_allclose(found, expected[start - 21 : stop - 21], atol=2e-4)


def test_trees_of_several_sequences_in_a_batch(model: Llama) -> None:
    """Together with decodes, chains and prompts."""
    rng, runner, separate = np.random.default_rng(8), BatchedLlama(model, 16 << 20), BatchedLlama(model, 16 << 20)
    parts = []
    for key, (length, new, nodes) in enumerate(
        [(20, 1, 6), (9, 1, 0), (40, 1, 30), (33, 20, 0), (17, 1, 3), (30, 4, 0)]
    ):
        ids, blocks = rng.integers(3, 4096, length + nodes).tolist(), [*range(key * 6, key * 6 + 6)]
        for each in (runner, separate):
            each.forward([ModelInput(key, ids, 0, length - new, blocks, 0)])
        parents = random_parents(rng, nodes) if nodes else None
        parts.append(ModelInput(key, ids, length - new, length + nodes, blocks, nodes + 1, parents))
    ours = runner.forward(parts)
    theirs = np.concatenate([separate.forward([part]) for part in parts])
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_a_full_context_counts_depths(model: Llama) -> None:
    runner, ids = BatchedLlama(model, 16 << 20), [5] * 1028
    blocks = [*range(65)]
    assert runner.forward([ModelInput(0, ids[:1027], 1022, 1027, blocks, 1, [-1] * 4)]).shape == (1, 4096)
    with pytest.raises(ValueError, match="1025 tokens exceed the context length 1024"):
        runner.forward([ModelInput(0, ids[:1026], 1022, 1026, blocks, 1, [-1, 0, -1])])


TOY = Toy(lambda seen: np.random.default_rng(seen).normal(size=199).astype(np.float32), 199)


@pytest.mark.parametrize("seed", range(4))
def test_models_without_weights(seed: int) -> None:
    ours, separate = tree_and_branches(lambda: PagedToy(TOY, 60, 5), 199, seed, 4 + seed, 1 + seed)
    np.testing.assert_array_equal(np.stack(ours), np.stack(separate))


MODELS = ("llama", "mistral", "gemma2", "gpt-oss", "gpt2")
"""With windows, soft caps, sinks and learned positions."""


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, True) for name in MODELS), *((name, False) for name in MODELS[:-1])],
)
@pytest.mark.fast_cases(2)
def test_models_of_transformers(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    from test_batched_transformers import PACKED, batched_model, model_of

    if not compiled:
        monkeypatch.setattr(batched_model, "has_kernel", lambda device, dtype: False)
    runner = runner_of(model_of(*PACKED[name]), 8 << 20)
    assert runner.paged, runner.unbatched_reason
    assert runner.tree_attention
    for seed, (nodes, chunk) in enumerate([(6, 1), (3, 9), (5, 0)]):
        ours, separate = tree_and_branches(lambda: runner, 199, seed, nodes, chunk)
        np.testing.assert_allclose(np.stack(ours), np.stack(separate), atol=2e-3)


@given(st.integers(0, 2**20))
@settings(max_examples=30)
def test_moves_read_before_they_write(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool, blocks = allocate_kv_cache(9, 16, 2, 8, 8), rng.permutation(9).tolist()
    for array in pool:
        array[:] = rng.standard_normal(array.shape)
    before = [array.copy() for array in token_major(pool, 16)]
    moves, expected = [], [array.copy() for array in before]
    for key in range(2):
        table, start = blocks[key * 4 : key * 4 + 4], int(rng.integers(0, 40))
        count = int(rng.integers(1, 20))
        sources = sorted(rng.choice(np.arange(start, 64), count, replace=False).tolist())
        moves.append(Move(key, table, sources, start))
        for target, source in enumerate(sources, start):
            for array, old in zip(expected, before, strict=True):
                array[table[target // 16], :, target % 16] = old[table[source // 16], :, source % 16]
    copy_slots(pool, *slots_of(moves, 16))
    for array, right in zip(token_major(pool, 16), expected, strict=True):
        np.testing.assert_array_equal(array, right)

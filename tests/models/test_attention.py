"""The attention kernel equals a float64 implementation for every shape and attention rule."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleate.jit.kernel_libraries import MODELS
from nucleate.models import cpu_operations, kernels
from nucleate.models.paged_cache import NO_SINKS, AttentionRule, BatchLayout, allocate_kv_cache, token_major
from nucleate.models.runner import ModelInput


def attended(query_HD, keys_LKD, values_LKE, rule, length):
    """The attention output of the token at position length - 1."""
    oldest = max(0, length - rule.window) if rule.window else 0
    group = len(query_HD) // keys_LKD.shape[1]
    rows = []
    for head, query in enumerate(query_HD.astype(np.float64)):
        scores = keys_LKD[oldest:length, head // group] @ query * rule.scaling
        if rule.softcap:
            scores = rule.softcap * np.tanh(scores / rule.softcap)
        if len(rule.sinks):
            scores = np.append(scores, rule.sinks[head])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        rows.append(weights[: length - oldest] @ values_LKE[oldest:length, head // group].astype(np.float64))
    return np.stack(rows)


@st.composite
def cases(draw):
    group, kv_heads = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    sinks = draw(st.booleans())
    rule = AttentionRule(
        draw(st.sampled_from([0.01, 0.125, 1.0])),
        draw(st.sampled_from([0, 0, 1, 2, 15, 16, 17, 40, 1000])),
        draw(st.sampled_from([0.0, 0.0, 0.5, 50.0])),
        np.linspace(-3, 3, group * kv_heads, dtype=np.float32) if sinks else NO_SINKS,
    )
    size = draw(st.integers(1, 32)) * 8
    return dict(
        rule=rule, kv_heads=kv_heads, heads=group * kv_heads, size=size,
        value_size=draw(st.sampled_from([size, size, 8, 24, 64])),
        block_size=draw(st.sampled_from([16, 16, 32, 48])),
        lengths=draw(st.lists(st.integers(1, 200), min_size=1, max_size=5)),
        new=draw(st.integers(1, 8)), threads=draw(st.integers(1, 3)), seed=draw(st.integers(0, 2**20)),
    )  # fmt: skip


def run(rule, kv_heads, heads, size, value_size, block_size, lengths, new, threads, seed, dirt=np.nan):
    """The kernel's outputs and the expected ones, for the last ``new`` tokens of some sequences."""
    random = np.random.default_rng(seed)
    blocks = sum(-(-length // block_size) for length in lengths) + 2
    free = random.permutation(blocks).tolist()
    pool = allocate_kv_cache(blocks, block_size, kv_heads, size, value_size)
    for array in pool:
        array[:] = dirt
    keys, values = token_major(pool, value_size)
    parts, olds = [], []
    for key, length in enumerate(lengths):
        start = max(0, length - new)
        table = [free.pop() for _ in range(-(-length // block_size))]
        old = [random.standard_normal((length, kv_heads, d), np.float32) for d in (size, value_size)]
        for position in range(start):
            keys[table[position // block_size], :, position % block_size] = old[0][position]
            values[table[position // block_size], :, position % block_size] = old[1][position]
        parts.append(ModelInput(key, [0] * length, start, length, table, 1))
        olds.append(old)
    packing = BatchLayout(parts, block_size)
    queries = random.standard_normal((packing.size, heads, size), np.float32)
    new_keys, new_values = (
        np.concatenate([old[i][part.start :] for old, part in zip(olds, parts, strict=True)]) for i in (0, 1)
    )
    out = np.full((packing.size, heads, value_size), 7, np.float32)
    strided = np.asfortranarray(queries) if seed % 2 else queries
    cpu_operations.decode_attention(strided, new_keys, new_values, pool, packing, rule, out, threads)
    rows = [
        attended(queries[first + position - part.start], *old, rule, position + 1)
        for part, old, first in zip(parts, olds, packing.inputs[:, 0], strict=True)
        for position in range(part.start, part.stop)
    ]
    return out, np.stack(rows), (parts, pool, olds)


@pytest.mark.slow
@given(cases())
@settings(max_examples=tiers.count(37, 150))
def test_the_kernel_equals_attention(case) -> None:
    before, cpu_operations.MIN_BYTES = cpu_operations.MIN_BYTES, 0  # use threads for small inputs too
    try:
        ours, right, _ = run(**case)
    finally:
        cpu_operations.MIN_BYTES = before
    np.testing.assert_allclose(ours, right, atol=3e-5, rtol=1e-4)


PLAIN = dict(
    rule=AttentionRule(0.25), kv_heads=2, heads=4, size=16, value_size=16, block_size=16, lengths=[33, 16, 1], new=1,
    threads=1, seed=0,
)  # fmt: skip


def test_only_new_keys_and_values_are_stored() -> None:
    _, _, (parts, pool, olds) = run(**{**PLAIN, "new": 3})
    written = np.zeros(len(pool[0]) * 16, bool)
    for part, old in zip(parts, olds, strict=True):
        for array, values in zip(token_major(pool, 16), old, strict=True):
            for position in range(part.stop):
                block = part.block_ids[position // 16]
                np.testing.assert_array_equal(array[block, :, position % 16], values[position])
                written[block * 16 + position % 16] = True
    for array in token_major(pool, 16):
        assert np.isnan(array.swapaxes(1, 2).reshape(len(written), -1)[~written]).all()


def test_large_score_differences_do_not_overflow() -> None:
    ours, right, _ = run(**{**PLAIN, "rule": AttentionRule(100.0)})
    np.testing.assert_allclose(ours, right, atol=1e-3)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 4, 20])
def test_non_finite_values_stay_within_their_sequence(value: float, position: int) -> None:
    random = np.random.default_rng(0)
    keys_RLKD, values_RLKD = random.standard_normal((2, 3, 21, 2, 16)).astype(np.float32)
    keys_RLKD[1, position, 0, 3] = value
    queries_RHD = random.standard_normal((3, 4, 16)).astype(np.float32)
    pool = allocate_kv_cache(6, 16, 2, 16, 16)
    parts = [ModelInput(i, [0] * 21, 20, 21, [i, 3 + i], 1) for i in range(3)]
    for stored, rows in zip(token_major(pool, 16), (keys_RLKD, values_RLKD), strict=True):
        stored[:3] = rows[:, :16].swapaxes(1, 2)
        stored[3:, :, :4] = rows[:, 16:20].swapaxes(1, 2)
    out = np.empty((3, 4, 16), np.float32)
    cpu_operations.decode_attention(
        queries_RHD, keys_RLKD[:, 20], values_RLKD[:, 20], pool, BatchLayout(parts, 16), AttentionRule(1.0), out
    )
    with np.errstate(invalid="ignore"):
        right = [attended(queries_RHD[i], keys_RLKD[i], values_RLKD[i], AttentionRule(1.0), 21) for i in range(3)]
    np.testing.assert_allclose(out, right, atol=1e-5)
    assert np.isfinite(out[[0, 2]]).all()
    assert np.isnan(out[1, :2]).all() or not np.isnan(value)


def test_block_sizes_are_multiples_of_the_vector_size() -> None:
    with pytest.raises(ValueError, match="block_size must be a multiple of 16, got 8"):
        allocate_kv_cache(1, 8, 1, 16, 16)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 8), st.sampled_from([0, 5]))
def test_work_is_split_evenly(lengths: list[int], count: int, window: int) -> None:
    packing = BatchLayout([ModelInput(i, [0] * n, n - 1, n, [0] * n, 1) for i, n in enumerate(lengths)], 1)
    cuts = packing.split(3, window, count)
    work = np.repeat([min(n, window) if window else n for n in lengths], 3)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(work), count + 1)
    assert cuts == sorted(cuts)
    for begin, end in pairwise(cuts):
        assert work[begin:end].sum() <= work.sum() / count + work.max()


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(0, 20), st.integers(0, 2)), min_size=1, max_size=6
    ),
    st.integers(0, 99),
)
def test_packing_locates_every_token(given_parts, seed: int) -> None:
    random = np.random.default_rng(seed)
    free, parts, rows = random.permutation(200).tolist(), [], []
    for key, (start, count, logits, more) in enumerate(given_parts):
        stop = start + count
        blocks = [free.pop() for _ in range(-(-stop // 16) + more)]
        ids = random.integers(0, 99, stop + more).tolist()
        parts.append(ModelInput(key, ids, start, stop, blocks, min(logits, count)))
        rows += [(ids[p], p, blocks[p // 16] * 16 + p % 16, p >= stop - min(logits, count)) for p in range(start, stop)]
    packing = BatchLayout(parts, 16)
    ids, positions, slots, selected = zip(*rows, strict=True)
    assert packing.ids_T.tolist() == list(ids)
    assert packing.positions_T.tolist() == list(positions)
    assert packing.slots.tolist() == list(slots)
    assert packing.logits_indices.tolist() == np.flatnonzero(selected).tolist()
    for array in (packing.ids_T, packing.positions_T, packing.slots, packing.logits_indices):
        assert array.dtype == np.int64
    both = np.concatenate((packing.short, packing.long))
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, packing.inputs.tolist()))
    assert (packing.short[:, 2] - packing.short[:, 1] <= 8).all()
    assert (packing.long[:, 2] - packing.long[:, 1] > 8).all()
    for part, (_, _, stop, table) in zip(parts, packing.inputs, strict=True):
        assert packing.blocks[table : table + len(part.block_ids)].tolist() == part.block_ids
        assert part.stop == stop


@pytest.mark.slow
@given(st.floats(-120, 0, width=32))
def test_exp_equals_numpy(x: float) -> None:
    ours = kernels.exp(np.float32(x))
    assert ours == pytest.approx(np.exp(np.float64(max(x, -87.33))), rel=4e-7)


def test_gate_equals_silu_times_up() -> None:
    random = np.random.default_rng(0)
    both = random.standard_normal((5, 62)).astype(np.float32) * 30
    both[0, :3] = 0, 1e30, -1e30
    out = np.empty((5, 31), np.float32)
    MODELS.gate(both, out)
    gate, up = np.split(both.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)

"""Prefix selection without sorting agrees with NumPy's stable sort."""

from __future__ import annotations

import numpy as np
import pytest
from edge_rows import agrees

from nucleate.sampling.cpu.block_ops import FLOAT32
from nucleate.sampling.cpu.fused_kernel import load_row
from nucleate.sampling.cpu.fused_runner import workspace_size
from nucleate.sampling.cpu.prefix_selection import (
    BY_COUNT,
    BY_WEIGHT,
    UNBOUNDED,
    gather_candidates,
    keep_prefix,
    kth_value_bound,
    mark_uncertain,
)
from nucleate.sampling.cpu.workspace import Workspace, workspace_in

KINDS = ("smooth", "few levels", "equal", "signed zeros", "far apart", "one far above", "holes")


def scores(rng: np.random.Generator, count: int, kind: str) -> np.ndarray:
    x = rng.normal(size=count) * 3
    match kind:
        case "few levels":
            x = np.round(x)
        case "equal":
            x[:] = x[0]
        case "signed zeros":
            x = rng.choice([0.0, -0.0, 1e-40, -1e-40, 1.0], count)
        case "far apart":
            x = rng.choice([-1.0, 1.0], count) * 10.0 ** rng.uniform(-44, 38, count)
        case "one far above":
            x[rng.integers(count)] = 3e38
        case "holes":
            x[rng.random(count) < 0.6] = -np.inf
    return x.astype(np.float32)


def space(size: int) -> Workspace:
    work: Workspace = workspace_in(np.empty(workspace_size(size)), size)
    return work


def candidates(work: Workspace, ids: np.ndarray, x: np.ndarray, weights: np.ndarray) -> int:
    """Write candidates to the workspace."""
    n = len(ids)
    work.ids[:n], work.scores[:n], work.weights[:n] = ids, x, weights
    return n


def first(x: np.ndarray, weights: np.ndarray, target: float) -> list[int]:
    """Reference implementation: the shortest prefix whose weights reach a target, ids ascending."""
    order = np.argsort(-x, kind="stable")
    reaching = np.flatnonzero(np.cumsum(weights[order]) >= target)
    return sorted(order[: reaching[0] + 1 if len(reaching) else None].tolist())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_the_first_tokens_by_count_and_by_weight(kind: str) -> None:
    rng, work = np.random.default_rng(KINDS.index(kind)), space(4000)
    for _ in range(300):
        size, count = 4000, int(rng.choice([1, 2, 3, 30, 64, 65, 500]))
        x = scores(rng, size, kind)
        ids = np.sort(rng.choice(np.flatnonzero(x > -np.inf), min(count, (x > -np.inf).sum()), replace=False))
        count = len(ids)
        level = {float(score): rng.uniform(0.5, 1.5) for score in x[ids]}  # equal scores have equal weights
        given = np.array([level[float(score)] for score in x[ids]])
        for weights in (np.ones(count), given):
            if weights is given:
                target = float(given.sum() * rng.choice([1e-9, 0.3003, 0.5003, 0.9903, 2.0]))  # no tie of sums
            else:
                target = float(rng.integers(1, count + 1))
            way = BY_WEIGHT if weights is given else BY_COUNT
            selected = keep_prefix(candidates(work, ids, x[ids], weights), target, way, work)
            expected = first(x[ids], weights, target)
            assert work.ids[:selected].tolist() == ids[expected].tolist()
            assert work.weights[:selected].tolist() == weights[expected].tolist()
            assert work.scores[:selected].tolist() == x[ids][expected].tolist()


@pytest.mark.slow
def test_zero_weights_are_harmless() -> None:
    work, x, ids = space(3), np.array([1.0, 3.0, 2.0], np.float32), np.arange(3)
    assert keep_prefix(candidates(work, ids, x, np.zeros(3)), 0.0, BY_WEIGHT, work) in (1, 2, 3)
    n = candidates(work, ids, x, np.array([1.0, 0.0, 0.0]))
    assert keep_prefix(n, 1.1, BY_WEIGHT, work) == 3  # rounding may have made the target larger than all of them


@pytest.mark.slow
def test_tokens_at_which_the_target_may_be_reached_are_uncertain() -> None:
    work, x, weights = space(256), np.array([2.0, 5.0, 2.0, 4.0], np.float32), np.array([0.1, 0.5, 0.1, 0.3])
    for target, doubtful in ((0.95, []), (0.85, [2]), (0.75, [0, 2]), (0.3, [0, 2, 3])):
        n = candidates(work, np.arange(4), x, weights)
        assert mark_uncertain(n, 1.0, target, work)
        assert np.flatnonzero(work.weights[:n] < 0).tolist() == doubtful
    n = candidates(work, np.arange(100), np.zeros(100), np.full(100, 0.01))
    assert not mark_uncertain(n, 1.0, 0.1, work)  # more than are listed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fast_cases(0)
def test_a_bound_that_at_least_k_scores_reach_and_few_more(kind: str) -> None:
    rng = np.random.default_rng(10 + KINDS.index(kind))
    for _ in range(300):
        count = int(rng.choice([1, 2, 7, 125, 501, 1000]))
        values, k = scores(rng, count, kind), int(rng.integers(1, count + 1))
        cut = kth_value_bound(values, k)
        lowest = float(np.sort(values)[-k])
        assert cut <= lowest
        assert (values.astype(float) >= cut).sum() <= max(k + k // 8, (values >= lowest).sum())


@pytest.mark.slow  # compiles for many seconds
@pytest.mark.parametrize("size", [1, 63, 256, 300, 5000])
def test_scores_at_or_above_a_threshold_are_found_in_order(size: int) -> None:
    rng, work = np.random.default_rng(size), space(size)
    for kind in KINDS * 4:
        x = scores(rng, size, kind)
        load_row(x.ctypes.data, FLOAT32, size, 0, 0, 0, work)
        for cut in (np.float32(x.max()), np.sort(x)[-min(size, 9)], np.median(x), np.finfo(np.float32).min):
            cut = max(np.float32(cut), np.finfo(np.float32).min)
            found = gather_candidates(cut, UNBOUNDED, work)
            assert work.ids[:found].tolist() == np.flatnonzero(x >= cut).tolist()
            assert work.scores[:found].tolist() == x[x >= cut].tolist()


@pytest.mark.slow  # compiles for most of a minute
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_k_keeps_the_first_k(kind: str) -> None:
    rng = np.random.default_rng(20 + KINDS.index(kind))
    for size in (700, 5000, 32_000):
        for k in (63, 200, 1000, 4500):
            x = scores(rng, size, kind)
            if kind == "smooth":
                x.sort()  # as uneven as possible: the position determines the probability
            best = first(x, np.ones(size), float(min(k, size, (x > -np.inf).sum())))
            assert agrees(x, (1.0, 0.0, k, 0.0, 1.0, 0.0, 1.0), best), (size, k)

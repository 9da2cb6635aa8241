"""Every backend decides near ties as the reference does."""

from __future__ import annotations

import near_tie_rows as near_ties
import numpy as np
import pytest
import tiers

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.cpu.fused_runner import NOT_DRAWN, RowTable, thread_runner
from nucleate.sampling.inputs import LogitsInput
from nucleate.sampling.pipeline import FusedParams, simplify, to_fused_pipeline
from nucleate.sampling.stages import Gumbel


@pytest.mark.parametrize("kind", near_ties.KINDS)
@pytest.mark.fast_cases(1)
def test_the_generator_makes_near_ties(kind: str) -> None:
    first = near_ties.KINDS.index(kind)
    sides = []
    for index in range(first, first + 12 * len(near_ties.KINDS), len(near_ties.KINDS)):
        one, again = near_ties.case(index), near_ties.case(index)
        assert (one.kind, one.stages, one.seed, one.step) == (kind, again.stages, again.seed, again.step)
        assert one.logits.tobytes() == again.logits.tobytes()
        assert one.logits.dtype == np.float32
        target_gap = abs(one.gap)
        found = near_ties.measured(one)[kind]
        if kind == "top_k":
            assert found < 1e-5
        else:
            assert found <= 1.6 * target_gap + 3e-14
            # for these kinds another token may be nearer
            assert found >= 0.4 * target_gap - 3e-14 or kind in ("top_p", "min_p", "typical mass")
        assert reference.draw(one.logits, one.stages, one.seed, one.step) >= 0
        sides.append(one.gap > 0)
    assert 0 < sum(sides) < len(sides)


def fused_token(case: near_ties.Case, rows: int) -> int | None:
    """The fused kernel's token for the last row of a batch, or NOT_DRAWN; None if it does not support the case."""
    fused = to_fused_pipeline(simplify(case.stages))
    if isinstance(fused, str):
        return None
    table = RowTable()
    for row in range(rows):
        table.add(row, fused.params, (0, 0), (case.seed + rows - 1 - row) % 2**64, case.step)
    part = table.select(table.rows)
    logits = np.broadcast_to(case.logits, (rows, len(case.logits)))
    thread_runner(len(case.logits)).draw(LogitsInput(logits).layout(), rows, part.control)
    return int(part.tokens[-1])


def check_fused(indices: range, sizes: tuple[int, ...]) -> None:
    """The fused kernel returns the reference's token, in batches of any size, or NOT_DRAWN for a near tie."""
    sampled = left = 0
    for index in indices:
        case = near_ties.case(index)
        found = {rows: fused_token(case, rows) for rows in sizes}
        [token] = set(found.values())
        if token is None:
            continue
        sampled += 1
        expected = reference.draw(case.logits, case.stages, case.seed, case.step)
        if token == NOT_DRAWN:
            left += 1
            gaps = near_ties.measured(case)
            assert min(gaps[kind] for kind in ("group", "token", "top_p", "min_p")) < 4e-5, case
        else:
            assert token == expected, (index, case)
    assert sampled > len(indices) / 3
    assert left < 0.8 * sampled


@pytest.mark.slow
def test_the_fused_kernel_decides_near_ties_like_the_reference() -> None:
    check_fused(range(tiers.count(70, 420)), (1, 2, 16))
    check_fused(range(1000, 1021), (1, 300))


@pytest.mark.exhaustive
def test_the_fused_kernel_decides_very_many_near_ties_like_the_reference() -> None:
    check_fused(range(10_000, 20_000), (1, 2))
    check_fused(range(20_000, 20_500), (16, 300))


def test_the_fused_kernel_leaves_hardly_any_other_row_to_the_fallback() -> None:
    """Random rows, also flat ones, where the mass of a token is near the error of float32 sums."""
    rng, left = np.random.default_rng(5), 0
    params = [
        FusedParams(),
        FusedParams(t=0.7, p=0.9),
        FusedParams(t=0.8, k=40, m=0.05, p=0.95),
        FusedParams(m=1e-3),
        FusedParams(sigmas=1.0),
    ]
    for size, scale, rows in ((1000, 3.0, 2000), (20_000, 1.0, 2000), (20_000, 3.0, 1000), (128_256, 1.0, 200)):
        logits = np.float32(rng.normal(size=(1, size)) * scale)
        table = RowTable()
        for row in range(rows):
            table.add(row, params[row % len(params)], (0, 0), row, 3)
        part = table.select(table.rows)
        thread_runner(size).draw(LogitsInput(np.broadcast_to(logits, (rows, size))).layout(), rows, part.control)
        left += int((part.tokens == NOT_DRAWN).sum())
    assert left <= 1


def check(indices: range, rows: int) -> None:
    """The reference's token for the last row of a batch; rows share logits and have different seeds."""
    for index in indices:
        case = near_ties.case(index)
        expected = reference.draw(case.logits, case.stages, case.seed, case.step)
        seeds = [(case.seed + rows - 1 - row) % 2**64 for row in range(rows)]
        batch = [(*case.stages[:-1], Gumbel(seed)) for seed in seeds]
        logits = np.broadcast_to(case.logits, (rows, len(case.logits)))
        found = nc.sample(logits, batch, step=case.step, backend="cpu")
        assert found[-1] == expected, (index, case.kind, rows)


COUNTS = {1: tiers.count(70, 210), 2: tiers.count(35, 70), 16: tiers.count(21, 35), 300: tiers.count(1, 7)}


@pytest.mark.parametrize("rows", COUNTS)
@pytest.mark.fast_cases(0)
def test_near_ties_are_decided_like_the_reference(rows: int) -> None:
    check(range(1000, 1000 + COUNTS[rows]), rows)


@pytest.mark.exhaustive
def test_ten_thousand_near_ties_are_decided_like_the_reference() -> None:
    for index in range(10_000):
        check(range(index, index + 1), (1, 1, 2, 16)[index % 4] if index % 200 else 300)

"""Near ties on a device: where the two best tokens are 1e-14 to 1e-5 apart, the token equals the reference's."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import tiers

from nucleate.sampling import reference, signature
from nucleate.sampling.pipeline import simplify, to_fused_pipeline

torch = pytest.importorskip("torch", reason="rows on a device are tensors")
import near_tie_rows as near_ties  # noqa: E402

from nucleate.sampling.gpu import batch_sampling  # noqa: E402

BATCHES = 1, 2, 16, 300


def batched(cases: list[Any], rows: int) -> list[int]:
    """The tokens of near ties, sampled in batches: the fused pipelines in one call, the others by signature."""
    kinds, tokens = defaultdict(list), [0] * len(cases)
    for position, case in enumerate(cases):
        fused = to_fused_pipeline(simplify(case.stages))
        staged = signature.pipeline_signature(simplify(case.stages)) if isinstance(fused, str) else None
        kinds[staged and staged.signatures].append((position, staged or fused.params))
    for kind in kinds.values():
        for start in range(0, len(kind), rows):
            positions, some = zip(*kind[start : start + rows], strict=True)
            staged = (
                list(some) if isinstance(some[0], signature.PipelineSignature) else signature.fused_signatures(some)
            )
            size = max(len(cases[position].logits) for position in positions)
            x_RV = np.full((len(positions), size), -np.inf, np.float32)
            for x_V, position in zip(x_RV, positions, strict=True):
                x_V[: len(cases[position].logits)] = cases[position].logits
            words = np.array([[cases[position].seed, cases[position].step] for position in positions], np.uint64).view(
                np.int64
            )
            seeds_R, steps_R = torch.from_numpy(words).unbind(1)
            batch = batch_sampling.make_batch(staged, seeds_R, size, torch.float64)
            got = batch_sampling.run(batch, batch_sampling.StepInput(torch.from_numpy(x_RV).double(), steps_R))
            for position, token in zip(positions, got.tokens_R.tolist(), strict=True):
                tokens[position] = token
    return tokens


def differences(indices: range, batches: tuple[int, ...] = BATCHES) -> list[Any]:
    cases = [near_ties.case(index) for index in indices]
    expected = [reference.draw(one.logits, one.stages, one.seed, one.step) for one in cases]
    return [
        (rows, index, case.kind, case.gap, near_ties.measured(case)[case.kind], case.stages)
        for rows in batches
        for index, case, token, other in zip(indices, cases, batched(cases, rows), expected, strict=True)
        if token != other
    ]


@pytest.mark.slow
def test_near_ties_are_decided_like_the_reference() -> None:
    assert differences(range(tiers.count(35, 350))) == []


@pytest.mark.exhaustive
def test_ten_thousand_near_ties_are_decided_like_the_reference() -> None:
    found = []
    for start in range(0, 10_500, 350):
        found += differences(range(start, start + 350))
    assert found == []

"""Rows of one structure through their stages, as tensor code: any pipeline, on any device.

Waits for nothing, and no shape depends on a value, so that a CUDA graph can hold it. Each row is sorted once; what a
step needs beside logits, steps and states is made when the rows of a call are put together (``batch_of``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nucleate.sampling.backends.torch.bound_stage import BoundStage, mines
from nucleate.sampling.backends.torch.ranked_tokens import RankedTokens, RowConstants, sorted_of
from nucleate.sampling.backends.torch.shape_filters import narrowed
from nucleate.sampling.backends.torch.tensor_philox import PhiloxKeys, keys_of, uniform
from nucleate.sampling.backends.torch.tensor_shifts import padded
from nucleate.sampling.backends.torch.token_draw import drawn
from nucleate.sampling.backends.torch.torch_device import sent
from nucleate.sampling.dispatch.signature import PipelineSignature, StageSignature
from nucleate.sampling.noise import XTC
from nucleate.sampling.stage import DrawnToken


class TensorBatch(NamedTuple):
    """Rows of one structure that are drawn together."""

    steps: tuple[StageSignature, ...]
    masked: bool  #: see ``PipelineSignature``
    learns: bool
    fixed: RowConstants
    keys: PhiloxKeys
    mines: list[BoundStage]  #: with the numbers that rows came with
    spared: tuple[torch.Tensor, ...]  #: of each Ceiling, int64 [R, K], behind the vocabulary where there is none


class StepOutcome(NamedTuple):
    """What became of rows."""

    tokens_R: torch.Tensor  #: int64, -1 where there is none
    numbers_RP: torch.Tensor | None  #: as of the next step, if they change; those of a row without a token do not
    tapped_RV: torch.Tensor | None  #: the scores that the Tap saw, what is out at -inf; None without one


def batch_of(
    staged: Sequence[PipelineSignature], seeds_R: torch.Tensor, size: int, floats: torch.dtype, *, kernel: bool = False
) -> TensorBatch:
    """Rows of one structure.

    seeds_R: int64, the bits of integers in 0..2**64 - 1; size: V; kernel: see ``PhiloxKeys``.
    """
    one, device = staged[0], seeds_R.device
    numbers_RP = sent(torch.tensor([row.numbers for row in staged], dtype=floats).view(len(staged), -1), device)
    whole = any("whole" in rule.row for step in one.steps for rule in step.rules)
    fixed, nowhere = RowConstants(size, len(staged), floats, device, whole=whole), -(-size // 256) * 256
    spared = (padded([row.spared[i] for row in staged], nowhere) for i in range(len(one.spared)))
    return TensorBatch(
        one.steps, one.masked, one.learns, fixed, keys_of(seeds_R, kernel=kernel), mines(one.steps, numbers_RP),
        tuple(sent(each, device) for each in spared),
    )  # fmt: skip


class StepInput(NamedTuple):
    """What a step has to go on."""

    x_RV: torch.Tensor  #: the scores after the leading Shifts, see ``scores``
    steps_R: torch.Tensor  #: int64, the bits of integers in 0..2**64 - 1
    mask_RW: torch.Tensor | None = None  #: int32 [R, V / 32 or more], what is allowed, lowest bit first
    late_RW: torch.Tensor | None = None  #: the same, where a Tap that is the first step sees the scores without it
    numbers_RP: torch.Tensor | None = None  #: of rows that learn, as of this step; there may be more columns


def run(batch: TensorBatch, given: StepInput) -> StepOutcome:
    """Draw a token per row."""
    fixed, size, steps_R1, numbers_RP = batch.fixed, given.x_RV.shape[1], given.steps_R[:, None], given.numbers_RP
    x_RV = masked(fixed, given.x_RV, given.mask_RW)
    tapped_RV = x_RV if given.late_RW is not None else None
    kept, coins_R1, ceilings = sorted_of(fixed, masked(fixed, x_RV, given.late_RW)), None, iter(batch.spared)
    if batch.spared:
        coins_R1 = uniform(batch.keys, steps_R1, XTC, torch.zeros_like(steps_R1), fixed.floats)
    stages = batch.mines if numbers_RP is None else mines(batch.steps, numbers_RP)
    spans: dict[int, tuple[RankedTokens, RankedTokens]] = {}
    for place, mine in enumerate(stages):
        before = kept = kept.settled() if mine.step.learns else kept
        if mine.step.shape == "Tap":
            kept = kept.settled()
            if place > 0 or tapped_RV is None:
                tapped_RV = kept.by_id(torch.where(kept.inside(), kept.x_RN, -torch.inf))[:, :size]
        elif mine.step.greedy or mine.step.shape != "Draw":
            kept = narrowed(kept, mine, coins_R1, next(ceilings) if mine.step.shape == "Ceiling" else None)
        if mine.step.learns:
            kept = kept.settled()
            spans[place] = before, kept
    tokens_R1 = drawn(kept.settled(), stages[-1], batch.keys, steps_R1)
    tapped = any(step.shape == "Tap" for step in batch.steps)
    if not spans:
        return StepOutcome(tokens_R1[:, 0], None, tapped_RV if tapped else None)
    assert numbers_RP is not None  # noqa: S101  # rows that learn have them
    chances = {
        place: [
            kept.log_chance(tokens_R1) if name in stages[place].step.hears else fixed.zero
            for name, kept in zip(("before", "after"), span, strict=True)
        ]
        for place, span in spans.items()
    }
    tokens_R1, numbers_RP = _learned(fixed, numbers_RP, tokens_R1, stages, chances)
    return StepOutcome(tokens_R1[:, 0], numbers_RP, tapped_RV if tapped else None)


def scores(logits_RV: torch.Tensor, zero_1: torch.Tensor) -> torch.Tensor:
    """Scores in the floats of a zero; NaN and +inf stay. Of -0.0 it makes 0.0: they are equal."""
    if logits_RV.dtype == torch.float64 or zero_1.dtype == torch.float32:
        logits_RV = logits_RV.to(torch.float32)
    return logits_RV + zero_1


def masked(fixed: RowConstants, x_RV: torch.Tensor, mask_RW: torch.Tensor | None) -> torch.Tensor:
    """What a bitmask leaves: the logarithm of a bit is 0 or -inf. Of NaN and +inf it makes NaN, allowed or not."""
    if mask_RW is None:
        return x_RV
    return x_RV + ((mask_RW.index_select(1, fixed.word_N) >> fixed.bit_N) & 1).log()


def _learned(
    fixed: RowConstants,
    numbers_RP: torch.Tensor,
    tokens_R1: torch.Tensor,
    stages: list[BoundStage],
    chances: dict[int, list[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and numbers as of the next step. What would learn what is no number has no token, as on the host."""
    learned_RP = next_numbers(numbers_RP, tokens_R1, stages, chances)
    places = [name in mine.step.learns for mine in stages for name in mine.step.numbers]
    for place in (place for place, changes in enumerate(places) if changes):
        tokens_R1 = torch.where(learned_RP[:, place : place + 1].abs() < torch.inf, tokens_R1, fixed.none)
    return tokens_R1, torch.where(tokens_R1 >= 0, learned_RP, numbers_RP)


def next_numbers(
    numbers_RP: torch.Tensor, tokens_R1: torch.Tensor, stages: list[BoundStage], chances: dict[int, list[torch.Tensor]]
) -> torch.Tensor:
    """What stages make of tokens, whatever it is. chances: log-probabilities [R, 1] before and after them, by place."""
    columns, taken = [], 0
    for place, mine in enumerate(stages):
        own_RP = numbers_RP[:, taken : taken + mine.step.width]
        columns.append(mine.after(DrawnToken(tokens_R1, *chances[place])) if place in chances else own_RP)
        taken += mine.step.width
    return torch.cat([*columns, numbers_RP[:, taken:]], 1)

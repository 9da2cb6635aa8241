"""Rows of one structure through its stages, as tensor code: the slow, obvious twin of the kernels, on any device.

Waits for nothing, and no shape depends on a value, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nucleate.backends.cuda.edits import Edits
from nucleate.backends.cuda.noise import uniform
from nucleate.backends.cuda.staged.bind import Mine, mines
from nucleate.backends.cuda.staged.draw import drawn
from nucleate.backends.cuda.staged.kept import by_id, everything, log_chance
from nucleate.backends.cuda.staged.narrow import narrowed
from nucleate.backends.cuda.staged.start import masked, scores
from nucleate.backends.cuda.staged.structure import Step
from nucleate.core.noise import XTC
from nucleate.core.stage import Drawn

AT_ONCE = 1 << 24
"""So many scores are looked at together: a dozen arrays of 128 MB are made of them."""


class Drawing(NamedTuple):
    """The rows of a structure in a call."""

    steps: tuple[Step, ...]
    numbers_RP: torch.Tensor  #: see ``Staged.numbers``; there may be more columns
    spared: tuple[torch.Tensor, ...]  #: of each Ceiling, int64 [R, K], -1 for none
    seeds_R: torch.Tensor
    steps_R: torch.Tensor

    def rows(self, start: int, end: int) -> Drawing:
        """Some of them."""
        columns = self.numbers_RP, self.seeds_R, self.steps_R
        numbers_RP, seeds_R, steps_R = (column[start:end] for column in columns)
        return Drawing(self.steps, numbers_RP, tuple(one[start:end] for one in self.spared), seeds_R, steps_R)


class Outcome(NamedTuple):
    """What became of rows."""

    tokens_R: torch.Tensor  #: int64, -1 where there is none
    numbers_RP: torch.Tensor  #: as of the next step; those of a row without a token as they were
    told_RV: torch.Tensor | None  #: the scores that the Tap saw, what is out at -inf; None without one


def run(
    drawing: Drawing,
    logits_RV: torch.Tensor,
    edits: Edits | None = None,
    mask_RW: torch.Tensor | None = None,
    late_RW: torch.Tensor | None = None,
) -> Outcome:
    """Draw a token per row.

    logits_RV: any float; edits: of the leading Shifts. mask_RW: what is allowed. late_RW: the same, where a Tap that is
    the first step is to see the scores without it.
    """
    most = max(1, AT_ONCE // logits_RV.shape[1])
    if len(logits_RV) <= most:
        return _run(drawing, logits_RV, edits, mask_RW, late_RW)
    parts = []
    for start in range(0, len(logits_RV), most):
        end = start + most
        masks = [None if mask is None else mask[start:end] for mask in (mask_RW, late_RW)]
        own = edits and Edits(*(column[start:end] for column in edits))
        parts.append(_run(drawing.rows(start, end), logits_RV[start:end], own, *masks))
    told = [part.told_RV for part in parts if part.told_RV is not None]
    tokens_R, numbers_RP = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return Outcome(tokens_R, numbers_RP, torch.cat(told) if told else None)


def _run(drawing: Drawing, logits_RV: torch.Tensor, edits: Edits | None, mask_RW: Any, late_RW: Any) -> Outcome:
    floats, size = drawing.numbers_RP.dtype, logits_RV.shape[1]
    x_RV, odd_R1 = scores(logits_RV, floats, edits, mask_RW)
    told_RV = x_RV
    if late_RW is not None:
        x_RV, odd_R1 = masked(x_RV, odd_R1, late_RW)
    keys_R1 = drawing.seeds_R[:, None], drawing.steps_R[:, None]
    kept, coins_R1, ceilings = everything(x_RV, odd_R1), None, iter(drawing.spared)
    if drawing.spared:
        coins_R1 = uniform(*keys_R1, XTC, torch.zeros_like(keys_R1[0]), floats)
    stages, spans = mines(drawing.steps, drawing.numbers_RP), {}
    for place, mine in enumerate(stages):
        before = kept
        if mine.step.shape == "Tap":
            told_RV = by_id(kept, size) if place or late_RW is None else told_RV
        elif mine.step.greedy or mine.step.shape != "Draw":
            kept = narrowed(kept, mine, coins_R1, next(ceilings) if mine.step.shape == "Ceiling" else None)
        if mine.step.learns:
            spans[place] = before, kept
    tokens_R = torch.where(kept.odd_R1[:, 0], -1, drawn(kept, stages[-1], *keys_R1))
    chances = {place: [log_chance(kept, tokens_R) for kept in span] for place, span in spans.items()}
    tokens_R, numbers_RP = learned(drawing.numbers_RP, tokens_R, stages, chances)
    tapped = any(step.shape == "Tap" for step in drawing.steps)
    return Outcome(tokens_R, numbers_RP, told_RV if tapped else None)


def learned(
    numbers_RP: torch.Tensor, tokens_R: torch.Tensor, stages: list[Mine], chances: dict[int, list[torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and numbers as of the next step. What would learn what is no number has no token, as on the host.

    chances: by the place of a stage, the log-probabilities [R, 1] before and after it.
    """
    if not chances:
        return tokens_R, numbers_RP
    learned_RP = next_numbers(numbers_RP, tokens_R, stages, chances)
    columns = [name in mine.step.learns for mine in stages for name in mine.step.columns]
    for column_R in (learned_RP[:, place] for place, changes in enumerate(columns) if changes):
        tokens_R = torch.where(column_R.isfinite(), tokens_R, -1)
    return tokens_R, torch.where(tokens_R[:, None] >= 0, learned_RP, numbers_RP)


def next_numbers(
    numbers_RP: torch.Tensor, tokens_R: torch.Tensor, stages: list[Mine], chances: dict[int, list[torch.Tensor]]
) -> torch.Tensor:
    """What stages make of tokens, whatever it is."""
    columns, taken = [], 0
    for place, mine in enumerate(stages):
        count = mine.step.width
        own_RP = numbers_RP[:, taken : taken + count]
        columns.append(mine.after(Drawn(tokens_R[:, None], *chances[place])) if place in chances else own_RP)
        taken += count
    return torch.cat([*columns, numbers_RP[:, taken:]], 1)

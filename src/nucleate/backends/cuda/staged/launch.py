"""Rows of one structure through its kernel: room to work in, and the call. Twin of ``run``; knows no rule."""

from __future__ import annotations

from typing import Any

import torch

from nucleate.backends.cuda.special.index import Index
from nucleate.backends.cuda.staged import tiles
from nucleate.backends.cuda.staged.bind import mines
from nucleate.backends.cuda.staged.fuse import Fused, fused
from nucleate.backends.cuda.staged.run import Drawing, Outcome, learned

AT_ONCE = 1 << 24
"""So many scores are worked on together: their lists take some 50 bytes each."""
FLOATS = torch.float32, torch.float16, torch.bfloat16
TILE = tiles.TILE.value
OPTIONS = {"num_warps": 8, "num_stages": 1, "maxnreg": 255, "enable_fp_fusion": False}
"""Products are not fused into sums, as they are not on the CPU."""


class Workspace:
    """Room for the lists of ``rows`` rows of ``size`` scores; more of it is made as structures need it."""

    def __init__(self, rows: int, size: int, device: torch.device) -> None:
        self.rows, self.size, self.moved = rows, size, 0
        self._device = device
        self._kept: dict[str, torch.Tensor] = {}

    def room(self, name: str, there: bool, *shape: int, dtype: torch.dtype = torch.float64) -> Any:
        """An array by its name, made when it is first asked for; None where it is not there."""
        if not there:
            return None
        found = self._kept.get(name)
        if found is None or found.numel() < torch.Size(shape).numel():
            self._kept[name] = found = torch.empty(shape, dtype=dtype, device=self._device)
            self.moved += 1
        return found.view(-1)[: torch.Size(shape).numel()].view(shape)


def run(
    drawing: Drawing,
    masked: bool,
    logits_RV: torch.Tensor,
    work: Workspace,
    index: Index | None = None,
    mask_RW: torch.Tensor | None = None,
    late_RW: torch.Tensor | None = None,
) -> Outcome:
    """Draw a token per row. As ``run.run``; masked: see ``Staged``. Raises what Triton says of rules it does not take.

    logits_RV: float32, float16 or bfloat16, with any strides. What is told in the outcome is a part of ``work``.
    """
    kernel = fused(drawing.steps, masked)
    rows, size = logits_RV.shape
    tokens_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    told_RV = work.room("told", kernel.taps, rows, size)
    if kernel.taps:
        told_RV.fill_(-torch.inf)
    numbers = []
    for start in range(0, rows, work.rows):
        part = slice(start, min(start + work.rows, rows))
        own = drawing.rows(part.start, part.stop)
        masks = [None if mask is None else mask[part] for mask in (mask_RW, late_RW)]
        edits = index and Index(*(column[part] for column in index))
        told = told_RV[part] if kernel.taps else None
        _launched(kernel, own, logits_RV[part], work, edits, masks, told, tokens_R[part])
        numbers.append(_numbers(kernel, own, work, tokens_R[part]))
    return Outcome(tokens_R, torch.cat(numbers) if len(numbers) > 1 else numbers[0], told_RV)


def _launched(
    kernel: Fused,
    own: Drawing,
    logits_RV: torch.Tensor,
    work: Workspace,
    index: Index | None,
    masks: list[torch.Tensor | None],
    told: torch.Tensor | None,
    tokens: torch.Tensor,
) -> None:
    (rows, size), room = logits_RV.shape, work.room
    spared_RCK, seeds_R, steps_R = _spared(own), own.seeds_R.contiguous(), own.steps_R.contiguous()
    dense = room("dense", kernel.dense, rows, size)
    if dense is not None:
        dense.fill_(-torch.inf)
    words, entries = index or (None, None)
    saved = room("saved", kernel.marks > 0, rows, kernel.marks, size)
    marks = room("marks", kernel.marks > 0, rows, kernel.marks, 2)
    kernel.kernel[(rows,)](
        logits_RV, *logits_RV.stride(), size, *_strided(masks[0]), *_strided(masks[1]), *_strided(words),
        *_strided(entries), *_strided(own.numbers_RP), *_strided(spared_RCK), spared_RCK.shape[2], seeds_R, steps_R,
        room("ids", True, rows, size, dtype=torch.int32), room("x", True, rows, size),
        room("base", kernel.based, rows, size), room("weights", kernel.weighs, rows, size),
        room("few", kernel.weighs, rows, TILE, dtype=torch.int64), room("few_weights", kernel.weighs, rows, TILE),
        room("keys", kernel.own, rows, size), dense, told, *_strided(saved), *_strided(marks), size, tokens,
        room("lefts", True, rows, dtype=torch.int32), kernel.digest, **OPTIONS,
    )  # fmt: skip


def _strided(column: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    return column, 0 if column is None else column.stride(0)


def _spared(own: Drawing) -> torch.Tensor:
    """The ids that no Ceiling drops, int64 [R, C, K]: lists of one length, -1 where there is none."""
    if not own.spared:
        return own.seeds_R[:, None, None]
    most = max(each.shape[1] for each in own.spared)
    padded = [torch.nn.functional.pad(each, (0, most - each.shape[1]), value=-1) for each in own.spared]
    return torch.stack(padded, 1).contiguous()


def _numbers(kernel: Fused, own: Drawing, work: Workspace, tokens_R: torch.Tensor) -> torch.Tensor:
    """The numbers as of the next step. What would learn what is no number has no token."""
    if not kernel.marks:
        return own.numbers_RP
    rows = len(tokens_R)
    saved = work.room("saved", True, rows, kernel.marks, work.size)
    marks = work.room("marks", True, rows, kernel.marks, 2)
    place_RM1 = tokens_R.clamp(min=0)[:, None, None].expand(-1, kernel.marks, 1)
    chance_RM = saved.gather(2, place_RM1)[:, :, 0] - marks[:, :, 0] - marks[:, :, 1]
    places = [place for place, step in enumerate(own.steps) if step.learns]
    chances = {place: [chance_RM[:, 2 * i, None], chance_RM[:, 2 * i + 1, None]] for i, place in enumerate(places)}
    drawn_R, numbers_RP = learned(own.numbers_RP, tokens_R, mines(own.steps, own.numbers_RP), chances)
    tokens_R.copy_(drawn_R)
    return numbers_RP

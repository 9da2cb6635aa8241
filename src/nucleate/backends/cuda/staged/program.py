"""The kernel of a structure, but for its stages, which ``fuse`` binds: one program per row."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from nucleate.backends.cuda.special.noise import uniform
from nucleate.backends.cuda.special.scores import Source
from nucleate.backends.cuda.staged.tiles import FINE, TILE, Work, start
from nucleate.core import noise

XTC = tl.constexpr(noise.XTC)

stages: Any = None
draw = BASED = WHOLE = FLIPS = stages


def program(  # noqa: C901  # what is not there has no row
    logits: tl.tensor, row_stride: tl.tensor, stride: tl.tensor, size: tl.tensor, mask: tl.tensor,
    mask_stride: tl.tensor, late: tl.tensor, late_stride: tl.tensor, words: tl.tensor, words_stride: tl.tensor,
    entries: tl.tensor, entries_stride: tl.tensor, numbers: tl.tensor, numbers_stride: tl.tensor, spared: tl.tensor,
    spared_stride: tl.tensor, spared_width: tl.tensor, seeds: tl.tensor, steps: tl.tensor, ids: tl.tensor,
    x: tl.tensor, base: tl.tensor, weights: tl.tensor, few: tl.tensor, few_weights: tl.tensor, keys: tl.tensor,
    dense: tl.tensor, told: tl.tensor, saved: tl.tensor, saved_stride: tl.tensor, marks: tl.tensor,
    marks_stride: tl.tensor, width: tl.tensor, tokens: tl.tensor, lefts: tl.tensor, digest: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: rows. mask, late, words, entries: see ``special.stats``; late comes after a Tap that is the first step.

    numbers: float64 [R, P]. spared: int64 [R, C * spared_width]. seeds, steps: int64 [R]. From ids to told [R, width],
    but few and few_weights [R, TILE]; saved: float64 [R, M, width], marks: [R, M, 2]; see ``tiles.Work``. tokens: int64
    [R], -1 where there is none. lefts: int32 [R], how many tokens were left before the draw. digest: of all that is
    bound, as nothing else of it is in the key of a cache.
    """
    row = tl.program_id(0).to(tl.int64)
    if mask is not None:
        mask += row * mask_stride
    if late is not None:
        late += row * late_stride
    if words is not None:
        words += row * words_stride
        entries += row * entries_stride
    if base is not None:
        base += row * width
    if weights is not None:
        weights += row * width
        few += row * TILE
        few_weights += row * TILE
    if keys is not None:
        keys += row * width
    if dense is not None:
        dense += row * width
    if told is not None:
        told += row * width
    if saved is not None:
        saved += row * saved_stride
        marks += row * marks_stride
    seed, step = tl.load(seeds + row), tl.load(steps + row)
    coin = tl.full((), 1.0, tl.float64)
    if FLIPS:
        coin = tl.max(uniform(seed, step, XTC, tl.arange(0, 2) * 0), 0)
    source = Source(logits + row * row_stride, stride, size, mask, words, entries)
    work = Work(
        ids + row * width, x + row * width, base, weights, few, few_weights, keys, dense, told, saved, marks, width,
        late, numbers + row * numbers_stride, spared + row * spared_stride, spared_width, coin,
    )  # fmt: skip
    kept = stages(work, start(source, work, BASED, WHOLE))
    token = draw(work, kept, size, seed, step)
    tl.store(tokens + row, tl.where(kept.state == FINE, token, -1).to(tl.int64))
    tl.store(lefts + row, kept.n)

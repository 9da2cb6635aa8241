"""The first kernel: reads each logit once and stores the top and the mass of each group of 256. Decides nothing."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.floats import INFINITY, LOWEST, exponent_of, weights
from nucleate.backends.cuda.special.numbers import COLUMNS, read, weighing
from nucleate.backends.cuda.special.scores import raw, ready, source_of

GROUP_SIZE = tl.constexpr(256)


@jit
def stats(
    logits: tl.tensor, row_stride: tl.tensor, stride: tl.tensor, size: tl.tensor, mask: tl.tensor,
    mask_stride: tl.tensor, words: tl.tensor, words_stride: tl.tensor, entries: tl.tensor, entries_stride: tl.tensor,
    numbers: tl.tensor, tops: tl.tensor, masses: tl.tensor, moments: tl.tensor, raw_tops: tl.tensor,
    raw_masses: tl.tensor, tiles: tl.tensor, width: tl.constexpr, tile_groups: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: parts of ``tiles`` tiles of ``tile_groups`` groups; rows.

    numbers: float64 [R, COLUMNS], see ``numbers.Numbers``. tops, masses: float32 [R, width], width a power of two, at
    least the number of groups. A mass is the sum of exp((x - top of the group) / t). The top of a group with NaN or
    +inf is +inf, of one with no token -inf. moments: float64 [R, 3, width], only of rows with top-n-sigma: how many are
    in, the sum of x - top, of its square. raw_tops, raw_masses: the same of the logits as given, at temperature 1; or
    None.
    """
    row = tl.program_id(1).to(tl.int64)
    source = source_of(
        row, logits, row_stride, stride, size, mask, mask_stride, words, words_stride, entries, entries_stride
    )
    given = read(numbers + row * COLUMNS)
    exponent = exponent_of(weighing(given))
    for i in range(tiles):
        group_G = (tl.program_id(0) * tiles + i) * tile_groups + tl.arange(0, tile_groups)
        ids_GT = group_G[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        raw_GT = raw(source, ids_GT)
        x_GT = ready(source, ids_GT, raw_GT)
        at_G, there_G = row * width + group_G, group_G < width
        top_G, mass_G = summed(x_GT, exponent)
        tl.store(tops + at_G, top_G, mask=there_G)
        tl.store(masses + at_G, mass_G, mask=there_G)
        if given.sigmas > 0.0:
            in_GT = (x_GT > -INFINITY) & (x_GT < INFINITY)
            below_GT = tl.where(in_GT, x_GT.to(tl.float64) - top_G.to(tl.float64)[:, None], 0.0)
            at_G += 2 * row * width
            tl.store(moments + at_G, tl.sum(in_GT.to(tl.float64), 1), mask=there_G)
            tl.store(moments + width + at_G, tl.sum(below_GT, 1), mask=there_G)
            tl.store(moments + 2 * width + at_G, tl.sum(below_GT * below_GT, 1), mask=there_G)
        if raw_tops is not None:
            at_G = row * width + group_G
            top_G, mass_G = summed(raw_GT, plain_exponent())
            tl.store(raw_tops + at_G, top_G, mask=there_G)
            tl.store(raw_masses + at_G, mass_G, mask=there_G)


@jit
def summed(x_GT: tl.tensor, exponent: tl.tensor) -> Any:
    """The top and the mass of each group. A mass is finite, but for NaN or +inf among the scores."""
    top_G = tl.max(x_GT, 1)
    mass_G = tl.sum(weights(x_GT - tl.maximum(top_G, LOWEST)[:, None], exponent), 1)
    return tl.where(mass_G < INFINITY, top_G, INFINITY), mass_G


@jit
def plain_exponent() -> Any:
    return exponent_of(tl.full((), 1.0, tl.float64))

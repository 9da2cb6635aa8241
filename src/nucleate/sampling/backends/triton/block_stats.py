"""The first kernel: reads each logit once and stores the maximum and the mass of each group of 256."""

from __future__ import annotations

import triton.language as tl
from triton import jit

from nucleate.sampling.backends.triton.device_memory import line_of, raw, read, ready, source_of, weighing
from nucleate.sampling.backends.triton.float_bits import INFINITY, LOWEST, exponent_of, weights

GROUP_SIZE = tl.constexpr(256)


@jit
def stats(source, state, sums, tiles, width: tl.constexpr, tile_groups: tl.constexpr):
    """Grid: parts of ``tiles`` tiles of ``tile_groups`` groups; rows. See ``memory`` for the arguments."""
    row = tl.program_id(1).to(tl.int64)
    source, given = source_of(source, row), read(line_of(state, row))
    exponent = exponent_of(weighing(given))
    for i in range(tiles):
        group_G = (tl.program_id(0) * tiles + i) * tile_groups + tl.arange(0, tile_groups)
        ids_GT = group_G[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        raw_GT = raw(source, ids_GT)
        x_GT = ready(source, ids_GT, raw_GT)
        at_G, there_G = row * width + group_G, group_G < width
        top_G, mass_G = summed(x_GT, exponent)
        tl.store(sums.tops + at_G, top_G, mask=there_G)
        tl.store(sums.masses + at_G, mass_G, mask=there_G)
        if given.sigmas > 0.0:
            in_GT = (x_GT > -INFINITY) & (x_GT < INFINITY)
            below_GT = tl.where(in_GT, x_GT.to(tl.float64) - top_G.to(tl.float64)[:, None], 0.0)
            at_G += 2 * row * width
            tl.store(sums.moments + at_G, tl.sum(in_GT.to(tl.float64), 1), mask=there_G)
            tl.store(sums.moments + width + at_G, tl.sum(below_GT, 1), mask=there_G)
            tl.store(sums.moments + 2 * width + at_G, tl.sum(below_GT * below_GT, 1), mask=there_G)
        if sums.raw_tops is not None:
            at_G = row * width + group_G
            top_G, mass_G = summed(raw_GT, exponent_of(tl.full((), 1.0, tl.float64)))
            tl.store(sums.raw_tops + at_G, top_G, mask=there_G)
            tl.store(sums.raw_masses + at_G, mass_G, mask=there_G)


@jit
def summed(x_GT, exponent):
    """The top and the mass of each group. A mass is finite, but for NaN or +inf among the scores."""
    top_G = tl.max(x_GT, 1)
    mass_G = tl.sum(weights(x_GT - tl.maximum(top_G, LOWEST)[:, None], exponent), 1)
    return tl.where(mass_G < INFINITY, top_G, INFINITY), mass_G

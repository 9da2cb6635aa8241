"""The first kernel: reads each logit once, and stores the maximum and the mass of each group of 256 tokens."""

from __future__ import annotations

import triton.language as tl
from triton import jit

from nucleate.sampling.backends.triton import device_memory as memory
from nucleate.sampling.backends.triton.float_bits import INFINITY, LOWEST, make_exponent, weights

GROUP_SIZE = tl.constexpr(256)


@jit
def stats(source, state, sums, tiles, width: tl.constexpr, tile_groups: tl.constexpr):
    """Grid: rows; parts of ``tiles`` tiles of ``tile_groups`` groups. Arguments: see ``device_memory``."""
    row = memory.program_row()
    params = memory.load_params(memory.state_address(state, row))
    exponent = make_exponent(memory.group_temperature(params))
    for i in range(tiles):
        group_G = (tl.program_id(1) * tiles + i) * tile_groups + tl.arange(0, tile_groups)
        ids_GT = group_G[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        logits_GT = memory.load_logits(source, ids_GT)
        x_GT = memory.apply_mask(source, ids_GT, logits_GT)
        index_G, valid_G = row * width + group_G, group_G < width
        top_G, mass_G = group_sums(x_GT, exponent)
        tl.store(sums.tops + index_G, top_G, mask=valid_G)
        tl.store(sums.masses + index_G, mass_G, mask=valid_G)
        if params.sigmas > 0.0:
            finite_GT = (x_GT > -INFINITY) & (x_GT < INFINITY)
            below_GT = tl.where(finite_GT, x_GT.to(tl.float64) - top_G.to(tl.float64)[:, None], 0.0)
            index_G += 2 * row * width
            tl.store(sums.moments + index_G, tl.sum(finite_GT.to(tl.float64), 1), mask=valid_G)
            tl.store(sums.moments + width + index_G, tl.sum(below_GT, 1), mask=valid_G)
            tl.store(sums.moments + 2 * width + index_G, tl.sum(below_GT * below_GT, 1), mask=valid_G)
        if sums.raw_tops is not None:
            index_G = row * width + group_G
            top_G, mass_G = group_sums(logits_GT, make_exponent(tl.full((), 1.0, tl.float64)))
            tl.store(sums.raw_tops + index_G, top_G, mask=valid_G)
            tl.store(sums.raw_masses + index_G, mass_G, mask=valid_G)


@jit
def group_sums(x_GT, exponent):
    """The maximum and the mass of each group. A group with NaN or +inf gets the maximum +inf."""
    top_G = tl.max(x_GT, 1)
    mass_G = tl.sum(weights(x_GT - tl.maximum(top_G, LOWEST)[:, None], exponent), 1)
    return tl.where(mass_G < INFINITY, top_G, INFINITY), mass_G

"""The random numbers of ``sampling.noise`` in Triton kernels: the same bits."""

from __future__ import annotations

import torch
import triton.language as tl
from triton import jit

from nucleate.sampling import noise

TOKEN, GROUP = tl.constexpr(noise.TOKEN), tl.constexpr(noise.GROUP)
LOW = tl.constexpr(0xFFFFFFFF)
FIRST, SECOND = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
WEYL_FIRST, WEYL_SECOND = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
LARGEST = tl.constexpr(1.0 - 2.0**-53)


@jit
def low_word(word):
    """The low 32 bits of an integer as uint64, as products need 64 bits."""
    return (word & LOW).to(tl.uint64)


@jit
def uniform(seed, step, stream, index):
    """``noise.uniform``: float64. seed, step: int64. index: a block of non-negative integers."""
    c0 = index.to(tl.uint64)
    c1, c2 = low_word(step) + c0 * 0, low_word(step >> 32) + c0 * 0
    c3 = c0 * 0 + stream
    k0, k1 = low_word(seed), low_word(seed >> 32)
    for _ in tl.static_range(10):
        p0, p1 = c0 * FIRST, c2 * SECOND
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & LOW, (p0 >> 32) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + WEYL_FIRST) & LOW, (k1 + WEYL_SECOND) & LOW
    high, low = c0.to(tl.uint32).to(tl.float64), c1.to(tl.uint32).to(tl.float64)
    return tl.minimum((high * 4294967296.0 + low + 0.5) * 5.421010862427522e-20, LARGEST)


@jit
def exponentials(seed, step, stream, index):
    """Standard exponential random numbers, -log1p(-u). The token with the lowest exponential / weight is selected.

    log1p as by Kahan (1984): the rounding error of 1 - u cancels in the quotient.
    """
    u = uniform(seed, step, stream, index)
    rest = 1.0 - u
    return tl.where(rest == 1.0, u, tl.log(rest) * (u / tl.where(rest == 1.0, -1.0, rest - 1.0)))


BLOCK = 256


@jit
def uniforms(seeds, steps, index, stride, stream, count, out, block: tl.constexpr):
    """Grid: rows; parts of ``block`` numbers. seeds, steps: int64 [R]. index: int64, with ``stride`` between rows."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * block + tl.arange(0, block)
    ids = tl.load(index + row * stride + offset, mask=offset < count, other=0)
    u = uniform(tl.load(seeds + row), tl.load(steps + row), stream, ids)
    tl.store(out + row * count + offset, u, mask=offset < count)


def launch_uniform(seeds_R: torch.Tensor, steps_R1: torch.Tensor, stream: int, index: torch.Tensor) -> torch.Tensor:
    """``uniform`` as one launch: float64 [R, N]."""
    count, index = index.shape[-1], index.contiguous()
    out_RN = torch.empty((len(seeds_R), count), dtype=torch.float64, device=seeds_R.device)
    grid, stride = (len(seeds_R), -(-count // BLOCK)), count if index.dim() > 1 else 0
    uniforms[grid](seeds_R, steps_R1, index, stride, stream, count, out_RN, block=BLOCK, num_warps=4)
    return out_RN

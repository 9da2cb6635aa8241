"""Numbers in Triton kernels: order-preserving integers of floats, weights in fixed point, and random numbers.

The random numbers are those of ``sampling.noise``, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton import jit

from nucleate.sampling import maths, noise

INFINITY = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite float32."""
SLACK = tl.constexpr(maths.SLACK)
LOG2_E = tl.constexpr(1.4426950408889634)
MASS_ERROR = tl.constexpr(2.0**-18)
"""Upper bound on the relative error of the float32 mass of a group; derived in docs/decisions/0017-cuda.md."""


class ExponentPair(NamedTuple):
    """log2(e) / t as a sum of two float32 numbers, to compute exp((x - top) / t) with exp2."""

    high: Any  #: positive, so that -inf * high is -inf; likewise low
    low: Any


@jit
def make_exponent(t):
    """The ExponentPair of a temperature. t: float64."""
    c = (t * 0.0 + LOG2_E) / t
    high = c.to(tl.float32)
    high = tl.where(high.to(tl.float64) > c, from_ordered(to_ordered(high) - 1), high)
    return ExponentPair(high, tl.maximum((c - high.to(tl.float64)).to(tl.float32), 1e-30))


@jit
def weights(below, exponent):
    """The weights of scores in float32, with a relative error of 2e-7. below: x - top; NaN stays."""
    return tl.exp2(below * exponent.high + below * exponent.low)


@jit
def exact_weight(x, top, t):
    """The weight exp((x - top) / t) in float64."""
    return tl.exp((x.to(tl.float64) - top.to(tl.float64)) / t)


@jit
def fixed_weight(x, top, t, unit):
    """Weights in fixed point, int64, so that sums are exact. unit: the value of the weight 1, float64."""
    return (exact_weight(x, top, t) * unit + 0.5).to(tl.int64)


@jit
def to_ordered(x):
    """Map float32 to int64, preserving the order; -0.0 is directly below 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def from_ordered(key):
    """The inverse of ``ordered``."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def lowest_kept(top, t, below):
    """The lowest finite float32 x with (x - top) / t >= below, in float64. below: negative."""
    low, high = to_ordered(top * 0.0 + LOWEST), to_ordered(top)
    while low < high:
        middle = (low + high) >> 1
        reaches = (from_ordered(middle).to(tl.float64) - top.to(tl.float64)) / t >= below
        high = tl.where(reaches, middle, high)
        low = tl.where(reaches, low, middle + 1)
    return from_ordered(high)


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

"""The parameters of the chain as kernels read them, from the line of a row."""

from __future__ import annotations

import triton.language as tl
from triton import jit

from nucleate.backends.chain import Numbers


@jit
def read(line):
    """The parameters of a line, float64. A greedy row, with a temperature of 0 or k = 1, has t = 1 and k = 1."""
    t, k = number(line, 0), number(line, 2)
    greedy = (t == 0.0) | (k == 1.0)
    t, k = tl.where(greedy, 1.0, t), tl.where(greedy, 1.0, k)
    return Numbers(t, number(line, 1), k, number(line, 3), number(line, 4), number(line, 5), number(line, 6))


@jit
def number(line, place: tl.constexpr):
    return tl.load(line + place).to(tl.float64, bitcast=True)


@jit
def weighing(numbers):
    """The temperature at which groups are weighed: top-p comes before the last temperature."""
    return tl.where(numbers.p < 1.0, numbers.t, numbers.t * numbers.late_t)

"""The parameters of the chain as kernels read them: one row of float64 per row of logits, in the planner's order."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from nucleate.backends.cuda.special.compile import jit


class Numbers(NamedTuple):
    """The parameters of a row, float64; the same fields as the planner's ``Numbers``."""

    t: Any
    sigmas: Any
    k: Any
    m: Any
    p: Any
    late_m: Any
    late_t: Any


COLUMNS = tl.constexpr(len(Numbers._fields))


@jit
def read(numbers: tl.tensor) -> Any:
    """The parameters at an address. A greedy row, whose temperature is 0 or whose k is 1, has t = 1 and k = 1."""
    t, k = tl.load(numbers), tl.load(numbers + 2)
    greedy = (t == 0.0) | (k == 1.0)
    return Numbers(
        tl.where(greedy, 1.0, t), tl.load(numbers + 1), tl.where(greedy, 1.0, k), tl.load(numbers + 3),
        tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6),
    )  # fmt: skip


@jit
def weighing(numbers: tl.tensor) -> Any:
    """The temperature at which groups are weighed: top-p comes before the last temperature."""
    return tl.where(numbers.p < 1.0, numbers.t, numbers.t * numbers.late_t)

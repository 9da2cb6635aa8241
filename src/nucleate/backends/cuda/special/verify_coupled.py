"""The kernel of coupled verification: what was drafted stays while it is what was drawn. Knows not how it was drawn."""

from __future__ import annotations

import triton.language as tl

from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.verify import among


@jit
def follow(
    drafted: tl.tensor, drawn: tl.tensor, count: tl.tensor, stops: tl.tensor, stop_count: tl.tensor, steps: tl.tensor,
    place_steps: tl.tensor, kept: tl.tensor, tokens: tl.tensor, tokens_row: tl.tensor, last: tl.tensor,
    ended: tl.tensor, failed: tl.tensor, width: tl.constexpr, stops_width: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: rows. width, stops_width: powers of two, at least N and ``stop_count``.

    drafted: int64 [R, K]. drawn: int64 [R, N]. stops: int64 [R, stop_count], or None. steps: int64 [R], which move on
    by as many tokens as are said; place_steps: int64 [R, N], those of the places of the next round, or None. The others
    are ``Verified``.
    """
    row, place_N = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    at_N, there_N = row * (count + 1) + place_N, place_N <= count
    token_N = tl.load(drafted + row * count + place_N, mask=place_N < count, other=-1)
    drawn_N = tl.load(drawn + at_N, mask=there_N, other=-1)
    going_N, end_N = (token_N == drawn_N) & (drawn_N >= 0), tl.zeros((width,), tl.int32)
    if stops is not None:
        end_N = among(stops + row * stop_count, drawn_N, stop_count, stops_width)
        going_N = going_N & (end_N == 0)
    place = tl.min(tl.where(going_N, width, place_N), 0)
    final = tl.sum(tl.where(place_N == place, drawn_N, 0), 0)
    tl.store(tokens + row * tokens_row + place_N, tl.where(place_N <= place, drawn_N, -1), mask=there_N)
    tl.store(kept + row, place.to(tl.int64))
    tl.store(last + row, final)
    tl.store(ended + row, tl.sum(tl.where(place_N == place, end_N, 0), 0) != 0)
    tl.store(failed + row, final < 0)
    step = tl.load(steps + row) + place + (final >= 0).to(tl.int64)
    tl.debug_barrier()  # all have read the last one
    tl.store(steps + row, step)
    if place_steps is not None:
        tl.store(place_steps + at_N, step + place_N, mask=there_N)

"""Kernels of chain rejection sampling: which drafted tokens stay, and the draw from what the target has over the draft.

``weigh`` sums the laws, part by part; ``accept`` decides on a row; ``residual`` and ``locate`` read the one row of p
and of q at which its draft ends, and draw from it in two levels, a part and a token. Meaning and shapes are those of
``backends.cuda.verify``; all sums are float64, so that tokens are those of the CPU. Knows not where laws come from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.floats import INFINITY
from nucleate.backends.cuda.special.noise import uniform
from nucleate.core import noise

ACCEPT, RESIDUAL = tl.constexpr(noise.ACCEPT), tl.constexpr(noise.RESIDUAL)
PART = tl.constexpr(2048)
"""So many tokens of a row are one program's."""
DONE, FROM_P, FROM_OVER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What is left to do for a row: nothing; to draw from p; from what p has over q."""
NEVER = tl.constexpr(0x7FFFFFFF)


class Laws(NamedTuple):
    """Where weights lie, of p or q: an address, or None for a q that gives each token a chance of 1."""

    at: Any
    row: Any  #: strides
    place: Any
    token: Any


@jit
def weigh(
    p: tl.tensor, p_row: tl.tensor, p_place: tl.tensor, p_token: tl.tensor, q: tl.tensor, q_row: tl.tensor,
    q_place: tl.tensor, q_token: tl.tensor, size: tl.tensor, count: tl.tensor, sums: tl.tensor, parts: tl.tensor,
) -> None:  # fmt: skip
    """Grid: parts; the N places of p, and then the K of q if it is not None; rows.

    p, q: any floats. sums: float64 [R, N + K or N, parts]; NaN where a weight is NaN or negative.
    """
    place, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    ids = tl.program_id(0) * PART + tl.arange(0, PART)
    at, there, drafted = ids.to(tl.int64), ids < size, (place - count - 1).to(tl.int64)
    if drafted < 0:
        of_p = p + row * p_row + place.to(tl.int64) * p_place + at * p_token
        weight = tl.load(of_p, mask=there, other=0.0).to(tl.float64)
    else:
        weight = tl.zeros((PART,), tl.float64)
        if q is not None:
            of_q = q + row * q_row + drafted * q_place + at * q_token
            weight = tl.load(of_q, mask=there, other=0.0).to(tl.float64)
    weight = tl.where(weight >= 0.0, weight, float("nan"))
    at = (row * tl.num_programs(1) + place) * parts + tl.program_id(0)
    tl.store(sums + at, tl.sum(weight, 0))


@jit
def accept(
    p: tl.tensor, p_row: tl.tensor, p_place: tl.tensor, p_token: tl.tensor, q: tl.tensor, q_row: tl.tensor,
    q_place: tl.tensor, q_token: tl.tensor, size: tl.tensor, count: tl.tensor, sums: tl.tensor, parts: tl.tensor,
    drafted: tl.tensor, stops: tl.tensor, stop_count: tl.tensor, seeds: tl.tensor, steps: tl.tensor, todo: tl.tensor,
    scales: tl.tensor, kept: tl.tensor, tokens: tl.tensor, tokens_row: tl.tensor, last: tl.tensor, ended: tl.tensor,
    failed: tl.tensor, width: tl.constexpr, parts_width: tl.constexpr, stops_width: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: rows. width, parts_width, stops_width: powers of two, at least N, ``parts``, ``stop_count``.

    drafted: int64 [R, K]. stops: int64 [R, stop_count], or None. todo: int32 [R], one of the constants above; scales:
    float64 [R, 2], by which the weights of p and q at the place are multiplied. The others are ``Verified``.
    """
    row, place_N = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    token_N = tl.load(drafted + row * count + place_N, mask=place_N < count, other=-1)
    inside_N = (token_N >= 0) & (token_N < size)
    if q is None:
        sums += row * (count + 1) * parts
    else:
        sums += row * (2 * count + 1) * parts
    p_sum_N = whole(sums, place_N, count + 1, parts, parts_width)
    p_N = chances(Laws(p + row * p_row, p_row, p_place, p_token), place_N, token_N, inside_N)
    is_law_N, chance_N = (p_sum_N > 0.0) & (p_sum_N < INFINITY), p_N / p_sum_N
    tried_N, q_sum_N, given_N = inside_N, p_sum_N * 0.0 + 1.0, tl.full((width,), 1.0, tl.float64)
    if q is not None:
        q_sum_N = whole(sums + (count + 1) * parts, place_N, count, parts, parts_width)
        given_N = chances(Laws(q + row * q_row, q_row, q_place, q_token), place_N, token_N, inside_N) / q_sum_N
        tried_N = tried_N & (given_N > 0.0)  # which is false where q is no law
    coin_N = uniform(tl.load(seeds + row), tl.load(steps + row), ACCEPT, place_N)
    stays_N = tried_N & (coin_N * given_N < chance_N)  # which is false where p is no law
    going_N = stays_N
    if stops is not None:
        going_N = stays_N & (among(stops + row * stop_count, token_N, stop_count, stops_width) == 0)
    place = tl.min(tl.where(going_N, width, place_N), 0)
    here_N = place_N == place
    said, law = any_of(here_N & stays_N), any_of(here_N & is_law_N)
    end = tl.sum(tl.where(here_N & stays_N, token_N + 1, 0), 0) - 1  # the stop id with which the row ends, or none
    path_N = tl.where((place_N < place) | (here_N & stays_N), token_N, -1)
    tl.store(tokens + row * tokens_row + place_N, path_N, mask=place_N <= count)
    tl.store(kept + row, place.to(tl.int64))
    tl.store(last + row, end)
    tl.store(ended + row, said)
    tl.store(failed + row, law == 0)
    from_what = tl.where(any_of(here_N & tried_N), FROM_OVER, FROM_P)
    tl.store(todo + row, tl.where(said | (law == 0), DONE, from_what))
    tl.store(scales + 2 * row, 1.0 / tl.sum(tl.where(here_N, p_sum_N, 0.0), 0))
    tl.store(scales + 2 * row + 1, 1.0 / tl.sum(tl.where(here_N, q_sum_N, 0.0), 0))


@jit
def residual(
    p: tl.tensor, p_row: tl.tensor, p_place: tl.tensor, p_token: tl.tensor, q: tl.tensor, q_row: tl.tensor,
    q_place: tl.tensor, q_token: tl.tensor, size: tl.tensor, count: tl.tensor, drafted: tl.tensor, todo: tl.tensor,
    scales: tl.tensor, kept: tl.tensor, totals: tl.tensor, parts: tl.tensor,
) -> None:  # fmt: skip
    """Grid: parts; rows. totals: float64 [R, 2, parts]: of p, and of what it has over q."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    what = tl.load(todo + row)
    if what != DONE:
        laws, other = Laws(p, p_row, p_place, p_token), Laws(q, q_row, q_place, q_token)
        ids = part * PART + tl.arange(0, PART)
        p_V, over_V = at_place(laws, other, row, ids, size, count, drafted, scales, kept, what)
        totals += 2 * row * parts + part
        tl.store(totals, tl.sum(p_V, 0))
        tl.store(totals + parts, tl.sum(over_V, 0))


@jit
def locate(
    p: tl.tensor, p_row: tl.tensor, p_place: tl.tensor, p_token: tl.tensor, q: tl.tensor, q_row: tl.tensor,
    q_place: tl.tensor, q_token: tl.tensor, size: tl.tensor, count: tl.tensor, drafted: tl.tensor, todo: tl.tensor,
    scales: tl.tensor, kept: tl.tensor, totals: tl.tensor, parts: tl.tensor, stops: tl.tensor, stop_count: tl.tensor,
    seeds: tl.tensor, steps: tl.tensor, tokens: tl.tensor, tokens_row: tl.tensor, last: tl.tensor, ended: tl.tensor,
    failed: tl.tensor, parts_width: tl.constexpr, stops_width: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: rows. Draws their last tokens; steps move on by as many tokens as are said."""
    row = tl.program_id(0).to(tl.int64)
    what, place, step = tl.load(todo + row), tl.load(kept + row), tl.load(steps + row)
    said = place + tl.where(tl.load(failed + row), 0, 1)
    tl.debug_barrier()  # all have read the step
    tl.store(steps + row, step + said)
    if what != DONE:
        part_T = tl.arange(0, parts_width)
        at_T, there_T = totals + 2 * row * parts + part_T, part_T < parts
        over_T = tl.load(at_T + parts, mask=there_T, other=0.0)
        what = tl.where(tl.sum(over_T, 0) > 0.0, what, FROM_P)  # nothing over is come to only by rounding
        total_T = tl.where(what == FROM_OVER, over_T, tl.load(at_T, mask=there_T, other=0.0))
        coin = uniform(tl.load(seeds + row), step, RESIDUAL, tl.full((), 0, tl.int32))
        goal = coin * tl.sum(total_T, 0)
        part = chosen(total_T, part_T, 0.0, goal)
        laws, other = Laws(p, p_row, p_place, p_token), Laws(q, q_row, q_place, q_token)
        ids = part * PART + tl.arange(0, PART)
        p_V, over_V = at_place(laws, other, row, ids, size, count, drafted, scales, kept, what)
        weight_V = tl.where(what == FROM_OVER, over_V, p_V)
        token = chosen(weight_V, ids, tl.sum(tl.where(part_T < part, total_T, 0.0), 0), goal).to(tl.int64)
        tl.store(tokens + row * tokens_row + place, token)
        tl.store(last + row, token)
        if stops is not None:
            token_1 = token + tl.zeros((1,), tl.int64)
            tl.store(ended + row, tl.max(among(stops + row * stop_count, token_1, stop_count, stops_width), 0) != 0)


@jit
def whole(sums: tl.tensor, place_N: tl.tensor, places: tl.tensor, parts: tl.tensor, parts_width: tl.constexpr) -> Any:
    """What the laws at all places weigh: float64 [width]."""
    part_T = tl.arange(0, parts_width)
    there_NT = (place_N < places)[:, None] & (part_T < parts)[None, :]
    return tl.sum(tl.load(sums + place_N[:, None] * parts + part_T[None, :], mask=there_NT, other=0.0), 1)


@jit
def chances(laws: tl.tensor, place_N: tl.tensor, token_N: tl.tensor, inside_N: tl.tensor) -> Any:
    """The weights of drafted tokens, float64 [width]; laws: of a row."""
    at_N = place_N.to(tl.int64) * laws.place + token_N * laws.token
    return tl.load(laws.at + at_N, mask=inside_N, other=0.0).to(tl.float64)


@jit
def at_place(
    p: tl.tensor, q: tl.tensor, row: tl.tensor, ids: tl.tensor, size: tl.tensor, count: tl.tensor, drafted: tl.tensor,
    scales: tl.tensor, kept: tl.tensor, what: tl.tensor,
) -> Any:  # fmt: skip
    """(p, what it has over q), of some tokens at the place at which a draft ends, float64. Without need, over is 0."""
    place = tl.load(kept + row)
    at, there = ids.to(tl.int64), ids < size
    p_V = tl.load(p.at + row * p.row + place * p.place + at * p.token, mask=there, other=0.0).to(tl.float64)
    p_V *= tl.load(scales + 2 * row)
    over_V = tl.zeros_like(p_V)
    if what == FROM_OVER:
        if q.at is None:
            q_V = (ids == tl.load(drafted + row * count + place)).to(tl.float64)
        else:
            q_V = tl.load(q.at + row * q.row + place * q.place + at * q.token, mask=there, other=0.0).to(tl.float64)
            q_V *= tl.load(scales + 2 * row + 1)
        over_V = tl.maximum(p_V - q_V, 0.0)
    return p_V, over_V


@jit
def chosen(weights: tl.tensor, ids: tl.tensor, before: tl.tensor, goal: tl.tensor) -> Any:
    """The id at which the sum of the weights, after what is before them, exceeds a goal; or else the last above 0.

    A scan adds in an order of its own, and its sums need not grow with each id: only a weight above 0 can be chosen.
    """
    there = weights > 0.0
    first = tl.min(tl.where(there & (before + tl.cumsum(weights, 0) > goal), ids, NEVER), 0)
    return tl.where(first < NEVER, first, tl.max(tl.where(there, ids, 0), 0))


@jit
def among(stops: tl.tensor, tokens: tl.tensor, stop_count: tl.tensor, stops_width: tl.constexpr) -> Any:
    """Which tokens are stop ids of a row: 0 or 1."""
    place_S = tl.arange(0, stops_width)
    stop_S = tl.load(stops + place_S, mask=place_S < stop_count, other=-1)
    return tl.max(((tokens[:, None] == stop_S[None, :]) & (tokens >= 0)[:, None]).to(tl.int32), 1)


@jit
def any_of(x_N: tl.tensor) -> Any:
    return tl.max(x_N.to(tl.int32), 0) != 0

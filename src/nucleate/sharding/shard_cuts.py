"""Decisions from the summaries of all groups: which scores a truncation may keep, and which group a draw selects.

All ranks compute the same numbers here, in NumPy float64. A decision closer than the error of these sums is left to the
whole row.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling import noise
from nucleate.sampling.maths import SLACK
from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.stage_base import RowStats
from nucleate.sharding.group_sums import Key, race
from nucleate.sharding.shard_plan import RowPlan

NEAR = 1e-10
"""Relative error at which a sum is too close to a target. A sum of V terms errs by less than V units of 2^-53, 3e-11
for 262,144 tokens."""

ROUNDING = 1e-4
"""The most by which rounding the maxima of groups to float32 may change their weights, as a relative error."""

Floats = NDArray[np.float64]


def candidate_bound(plan: RowPlan, maxima_G: NDArray[np.float32]) -> tuple[float, int]:
    """A score that every token reaches which the top-k and the min-p of a row can keep.

    If k is larger than the number of groups, also the k of which each shard sends its best; else 0.
    """
    top, bound, local_k = float(maxima_G.max()), -math.inf, 0
    if plan.m > 0.0:
        below = (math.log(plan.m) - 2.0 * SLACK) * plan.t
        bound = top + below - 1e-6 * (abs(top) - below)  # far more than the error of the score
    if 0 < plan.k <= len(maxima_G):
        at = len(maxima_G) - plan.k
        bound = max(bound, float(np.partition(maxima_G, at)[at]))
    elif plan.k:
        local_k = plan.k
    return bound, local_k


def top_p_bounds(fraction_B: Floats, weights_BG: Floats, tops_BG: Floats) -> NDArray[np.int64]:
    """For each row, the group whose maximum bounds a top-p from below; -1 if the maxima of all groups are too high.

    fraction_B: the part of the mass that top-p may leave out. weights_BG: the masses of the groups, and tops_BG those
    of their highest tokens. The tokens below a score weigh at most: all of the groups below it, and of the others what
    is left without the highest token, but not more than 255 tokens with that score.
    """
    order_BG = np.argsort(-tops_BG, axis=1, kind="stable")
    tops_BG, weights_BG = (np.take_along_axis(x, order_BG, 1) for x in (tops_BG, weights_BG))
    rest_BG = np.maximum(weights_BG - (1.0 - 2.0 * ROUNDING) * tops_BG, 0.0)
    total_B = weights_BG.sum(1)
    outside_BG = total_B[:, None] - np.cumsum(weights_BG, axis=1) + 1e-12 * total_B[:, None]
    rows, places = np.arange(len(tops_BG)), np.arange(tops_BG.shape[1])

    def is_enough(at_B: NDArray[np.int64]) -> NDArray[np.bool_]:
        limit_B = (GROUP_SIZE - 1) * tops_BG[rows, at_B]
        inside_BG = np.where(places <= at_B[:, None], np.minimum(rest_BG, limit_B[:, None]), 0.0)
        result: NDArray[np.bool_] = outside_BG[rows, at_B] + inside_BG.sum(1) <= fraction_B * total_B
        return result

    low_B, high_B = np.zeros(len(rows), np.int64), np.full(len(rows), len(places) - 1)
    found_B = is_enough(high_B)
    while (low_B < high_B).any():
        middle_B = (low_B + high_B) // 2
        enough_B = is_enough(middle_B)
        low_B, high_B = (
            np.where(enough_B, low_B, np.minimum(middle_B + 1, high_B)),
            np.where(enough_B, middle_B, high_B),
        )
    return np.where(found_B, order_BG[rows, high_B], -1)


def left_out(plan: RowPlan) -> float:
    """The part of the mass that the top-p of a plan certainly leaves out."""
    return max(0.0, 1.0 - float(plan.top_p.target(_stats(1.0))) - NEAR)  # type: ignore[union-attr]


def _stats(mass: float) -> RowStats:
    return RowStats(1, 0.0, mass, mass, 0.0, 0.0, 0.0, mass)


def top_p_kept(plan: RowPlan, x_N: Floats, total: float) -> NDArray[np.int64] | None:
    """The places of the tokens that top-p keeps, among all that it can keep, with ids ascending; None: too close.

    total: the mass of the row, relative to the highest of the scores.
    """
    order_N = np.argsort(-x_N, kind="stable")
    weight_N = np.exp((x_N[order_N] - x_N[order_N[0]]) / plan.t)
    before_N = np.concatenate(([0.0], np.cumsum(weight_N)))
    target = float(plan.top_p.target(_stats(total)))  # type: ignore[union-attr]
    low, high = np.searchsorted(before_N, (target * (1.0 - NEAR), target * (1.0 + NEAR)), side="left")
    if low != high or low > len(x_N):
        return None
    return np.sort(order_N[: max(low, 1)])


def drawn_group(weight_G: Floats, key: Key) -> int:
    """The group that a draw selects; -1 if two are too close."""
    return race(np.arange(len(weight_G)), weight_G, key, noise.GROUP)

"""Decides what the shards of a row exchange: from its pipeline, and then from the summaries of all groups.

Every cut keeps a prefix of one ranking. If the first truncation of a pipeline can be bounded from the summaries of the
groups, only the tokens above the bound are exchanged: a sampler over them returns what it returns over the whole row.

All ranks compute the same numbers here, in NumPy float64. A decision closer than the error of these sums is left to the
whole row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.distributions import is_stateful
from nucleate.sampling.maths import SLACK
from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.pipeline import TEMPERATURES
from nucleate.sampling.rules import rules_of_stage
from nucleate.sampling.stage import Combine, Draw, Pipeline, RowStats, Shift, Stage, Tap, min_keep_of
from nucleate.sampling.stages.selection import Gumbel
from nucleate.sampling.stages.temperature import Temperature
from nucleate.sampling.stages.truncation.min_p import MinP
from nucleate.sampling.stages.truncation.top_k import TopK
from nucleate.sampling.stages.truncation.top_p import TopP

CANDIDATES, TOP_P, GROUPS, WHOLE = "candidates", "top-p", "groups", "whole row"
"""What is exchanged: the tokens that a top-k, a min-p or a greedy draw may keep; those that a top-p keeps; the winner
of a draw without truncation; all logits of the row."""

MAX_CANDIDATES = 2048
"""The most tokens of a row that one rank sends; if there are more, the whole row is exchanged."""

MAX_LOGPROBS = 64
"""The most logprobs of a row that are computed without the whole row."""


class RowPlan(NamedTuple):
    """What the shards of a row exchange."""

    path: str  #: CANDIDATES, TOP_P, GROUPS or WHOLE
    why: str = ""  #: why the whole row is needed
    shifts: tuple[Shift, ...] = ()  #: at the beginning of the pipeline
    t: float = 1.0  #: the temperature before the first truncation
    k: int = 0  #: of CANDIDATES: the number of highest-ranked tokens that are needed; 0: no limit
    m: float = 0.0  #: of CANDIDATES: the minimum probability relative to the top; 0: none
    top_p: TopP | None = None
    tap: Tap | None = None  #: reports raw logprobs
    kept: Pipeline | None = None  #: samples from the exchanged tokens; None: the row's own pipeline does


def plan_of(stages: Pipeline, combine: Combine | None = None) -> RowPlan:
    """The plan of a simplified pipeline. combine: the stage that combines its logits with those of a companion."""
    if combine is not None:
        return RowPlan(WHOLE, f"{combine!r} reads two whole rows")
    tap = stages[0] if isinstance(stages[0], Tap) else None
    body = stages[tap is not None :]
    if tap is not None and max(tap.request[0], len(tap.request[1])) > MAX_LOGPROBS:
        return RowPlan(WHOLE, f"it reports more than {MAX_LOGPROBS} logprobs")
    end = next(i for i, stage in enumerate(body) if not isinstance(stage, Shift))
    shifts = tuple(stage for stage in body[:end] if isinstance(stage, Shift))
    scale = body[end] if type(body[end]) is Temperature and not body[end].greedy else None
    rest, t = body[end + (scale is not None) :], getattr(scale, "t", 1.0)
    if not TEMPERATURES[0] <= t <= TEMPERATURES[1]:
        return RowPlan(WHOLE, f"its temperature is not from {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}")
    plan = _cut(rest)
    if plan.path == WHOLE:
        return plan
    kept = None
    if plan.path == TOP_P:
        kept = (*body[: len(body) - len(rest)], *rest[1:])
    elif tap is not None:
        kept = body
    before = stages if kept is not None else shifts
    stateful = next((stage for stage in before if is_stateful(stage)), None)
    if stateful is not None:
        return RowPlan(WHOLE, f"{stateful!r} observes the whole row")
    return plan._replace(shifts=shifts, t=t, tap=tap, kept=kept)


def _cut(rest: Pipeline) -> RowPlan:
    """The plan for the stages after the Shifts and the temperature."""
    first, used = rest[0], 1
    if first.greedy:
        plan = RowPlan(CANDIDATES, k=1)
    elif type(first) is TopP and min_keep_of(first) == 1:
        plan = RowPlan(TOP_P, top_p=first)
    elif isinstance(first, Draw):
        plan, used = RowPlan(GROUPS), 0
        if type(first).score is not Gumbel.score or first.uniforms != "each":
            return RowPlan(WHOLE, f"{first!r} without truncation reads the whole row")
    else:
        k, m, used = _bounds(rest)
        if not used:
            return RowPlan(WHOLE, f"{first!r} reads the whole row")
        if k > MAX_CANDIDATES and not m:
            return RowPlan(WHOLE, f"{first!r} may keep more than {MAX_CANDIDATES} tokens")
        plan = RowPlan(CANDIDATES, k=0 if k > MAX_CANDIDATES else k, m=m)
    total = next((stage for stage in rest[used:] if _reads_total(stage)), None)
    return plan if total is None else RowPlan(WHOLE, f"{total!r} refers to the whole row")


def _bounds(rest: Pipeline) -> tuple[int, float, int]:
    """k and m of consecutive top-k and min-p stages, and their number. Their common survivors reach both bounds."""
    k, m = 0, 0.0
    for used, stage in enumerate(rest):
        if type(stage) is TopK and not k:
            k = stage.k
        elif type(stage) is MinP and not m and min_keep_of(stage) == 1:
            m = stage.m
        else:
            return k, m, used
    return k, m, len(rest)


def _reads_total(stage: Stage) -> bool:
    """Whether a stage reads the mass before the first truncation."""
    return any("full_mass" in rule.row for rule in rules_of_stage(stage).values())


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
        low_B = np.where(enough_B, low_B, np.minimum(middle_B + 1, high_B))
        high_B = np.where(enough_B, middle_B, high_B)
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

"""The few tokens that matter to a stage which keeps the fewest first ones, by a bound that costs one look at the row.

Tokens that weigh less than ``rest / n`` together weigh less than ``rest``: where a goal leaves so much, it is reached
without them. So, if weights are what the mass is the sum of, all others are at or above a score that is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from nucleate.backends.cpu.staged import candidates, keep
from nucleate.backends.cpu.staged.bind import values
from nucleate.backends.cpu.staged.bounds import never_negative
from nucleate.backends.cpu.staged.raw import Raw
from nucleate.backends.cpu.staged.room import Kept, Room
from nucleate.backends.rules import Inputs, line, reads, sums_to_mass
from nucleate.core.stage import Prefix, Row

FEW = 512
"""Of so many all may be looked at."""

MOST = 4096
"""A search for the best of more than these is not worth it."""

TRIES = 256, 4096, 32_768
"""So many of the best are looked at first."""

CLOSE = 1e-9
"""What is left beside the goal, as a part of the mass, is more than roundings if it is more than this."""

Tokens = Kept | Raw


def shortlist(work: Room, tokens: Tokens, stage: Any, goal: Callable[[Row], Any]) -> Kept | None:
    """Tokens among which all are whose weights reach a goal, the first ones of an order. None where all may be needed.

    goal: what the stage says it is, of a row that has what its target reads.
    """
    if tokens.m <= FEW:
        return None
    if isinstance(stage, Prefix) and counts(stage):
        return _best(work, tokens, float(goal(tokens.statistics(frozenset()))))
    if not sums_to_mass(stage):
        return _tried(work, tokens, stage, goal)
    cut = _cut(tokens, stage, goal)
    if cut is None:
        return None
    return tokens.from_cut(cut, tokens) if isinstance(tokens, Raw) else _above(work, tokens, cut)


def counts(stage: Prefix) -> bool:
    """Whether a stage keeps a number of tokens, the best ones."""
    plain = type(stage).order is Prefix.order and stage.reaches and not stage.ties
    return plain and reads(stage, "weight").ones and not reads(stage, "target").row


def _best(work: Room, tokens: Tokens, k: float) -> Kept | None:
    """The first k tokens, and maybe a few more."""
    if not 0.0 < k <= MOST:
        return None
    return _highest(work, tokens, math.ceil(k))


def _highest(work: Room, tokens: Tokens, k: int) -> Kept | None:
    if isinstance(tokens, Raw):
        top = np.float32(tokens.highest)
        cut = candidates.kth(tokens.row_V, work.tail, work.tops, top, k, work.v, work.cuts, work.sums)
        return tokens.from_raw(cut, tokens)
    tops = work.masses[: candidates.tops_of_many(tokens.x, tokens.m, work.masses)]
    if k > len(tops):
        return None
    cut = candidates.kth_top(tops, work.v, k) - tokens.top
    return _above(work, tokens, cut)


def _tried(work: Room, tokens: Tokens, stage: Any, goal: Callable[[Row], Any]) -> Kept | None:
    """More and more of the best, until they weigh enough: if no weight is negative, the others do not matter."""
    plain = isinstance(stage, Prefix) and type(stage).order is Prefix.order and not stage.ties
    if not (plain and isinstance(tokens, Raw) and never_negative(stage, "weight")):
        return None
    asked, row = reads(stage, "weight").row, tokens.statistics(reads(stage, "target").row)
    enough = float(goal(row)) * (1.0 + CLOSE)
    for k in TRIES:
        if 4 * k <= tokens.m and (kept := _highest(work, tokens, k)) is not None:
            values(stage, "weight", kept.x, kept.m, kept.top, tokens.statistics(asked), work.weights)
            if work.weights[: kept.m].sum() > enough:
                return kept
    return None


def _cut(tokens: Tokens, stage: Any, goal: Callable[[Row], Any]) -> float | None:
    """A score, from the top, that all tokens reach that matter."""
    order = type(stage).order if isinstance(stage, Prefix) else Prefix.order
    row = tokens.statistics(_asked(reads(stage, "target"), None if order is Prefix.order else reads(stage, "order")))
    rest = 0.99 * (row.mass - float(goal(row)))
    if not rest > CLOSE * row.mass:
        return None
    cut = math.log(rest / tokens.m)
    if isinstance(tokens, Raw):
        cut = tokens.raised(cut, rest)
    if order is not Prefix.order:
        found = line(stage, "order", row)
        if found is None or not (found.slope < 0.0 or (found.bent and found.slope != 0.0)):
            return None
        if found.bent:  # the nearest to a centre: all that are as near as the farthest of those above the cut
            centre = -found.offset / found.slope
            cut = min(cut, 2.0 * centre)
    return cut - CLOSE * (1.0 + abs(cut))


@cache
def _asked(target: Inputs, order: Inputs | None) -> frozenset[str]:
    """What a target and an order read, and the mass."""
    return target.row | (order.row if order else frozenset()) | {"mass"}


def _above(work: Room, kept: Kept, cut: float) -> Kept:
    ids, x = work.ids(), work.floats()
    m = keep.keep_above(kept.x, kept.ids, kept.m, kept.top, cut, x, ids)
    return Kept(ids, x, kept.base, m, kept.top, kept.whole, kept)

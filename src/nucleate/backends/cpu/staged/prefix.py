"""A Prefix: the fewest first tokens of an order whose weights reach a goal. And the token where they do."""

from __future__ import annotations

import numpy as np

from nucleate.backends import reference
from nucleate.backends.cpu.staged import keep, summary
from nucleate.backends.cpu.staged.bind import values
from nucleate.backends.cpu.staged.raw import listed
from nucleate.backends.cpu.staged.reach import ALL, WRONG, reach
from nucleate.backends.cpu.staged.room import Floats, Kept, Odd, Room
from nucleate.backends.cpu.staged.shortlist import Tokens, shortlist
from nucleate.backends.cpu.staged.summary import MASS
from nucleate.backends.rules import reads, sums_to_mass
from nucleate.core.stage import Draw, Prefix, Stage


def narrow(work: Room, tokens: Tokens, stage: Prefix, whole: reference.Whole) -> Kept:
    kept = shortlist(work, tokens, stage, stage.target) or listed(tokens)
    weigh(work, kept, stage)
    goal = float(stage.target(kept.statistics(reads(stage, "target").row)))
    strict = not stage.reaches
    if not (goal >= 0.0 if strict else goal > 0.0):
        goal, strict = -np.inf, False  # only the first
    order, sign = kept.x, -1.0
    if type(stage).order is not Prefix.order:
        order, sign = work.keys, 1.0
        said(kept, stage, "order", order)
    place = place_of(work, kept, order, sign, goal, strict)
    if place == ALL:
        return listed(tokens).with_whole(whole)
    ids, x = work.out(kept)
    m = keep.keep_until(order, sign, kept.x, kept.ids, kept.base, kept.m, place, strict, bool(stage.ties), x, ids)
    top = kept.top if sign < 0 else summary.scan(x, m)[0]
    return Kept(ids, x, kept.base, m, top, whole)


def weigh(work: Room, kept: Kept, stage: Prefix | Draw) -> None:
    """The weights of the tokens; and if they are what the mass is the sum of, that too."""
    if kept.among is not None or kept.known & MASS or not sums_to_mass(stage):
        said(kept, stage, "weight", work.weights)
    else:
        summary.statistics_and_weights(kept.x, kept.m, kept.top, kept.row, work.weights)
        kept.known |= MASS


def place_of(work: Room, kept: Kept, order: Floats, sign: float, goal: float, strict: bool) -> int:
    three = kept.x, kept.ids, kept.base
    place = reach(order, sign, work.weights, *three, kept.m, goal, strict, work.v, work.w, work.places, work.sums)
    if place == WRONG:
        raise Odd
    return int(place)


def said(kept: Kept, stage: Stage, rule: str, out: Floats) -> None:
    values(stage, rule, kept.x, kept.m, kept.top, kept.statistics(reads(stage, rule).row), out)

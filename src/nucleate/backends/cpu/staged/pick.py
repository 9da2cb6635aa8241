"""The token that a Draw takes of those that are in."""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.staged import candidates
from nucleate.backends.cpu.staged.prefix import place_of, weigh
from nucleate.backends.cpu.staged.raw import Raw, listed
from nucleate.backends.cpu.staged.reach import ALL
from nucleate.backends.cpu.staged.room import Floats, Ids, Odd, Room
from nucleate.backends.cpu.staged.shortlist import Tokens, shortlist
from nucleate.backends.rules import reads
from nucleate.core import noise
from nucleate.core.stage import Draw


def pick(work: Room, stage: Any, kept: Tokens, seed: int, step: int) -> int:
    """The token a Draw takes of those that are in. ``kept`` has no whole for it: it is the mass."""
    keys = np.uint64(seed), np.uint64(step)
    if stage.uniforms == "each":
        return _race_of_groups(work, stage, kept, *keys)
    if stage.uniforms == "none":
        kept = listed(kept)
        return _race(stage, kept.ids[: kept.m], kept.x[: kept.m] - kept.top, np.zeros(kept.m))
    if stage.uniforms != "one":
        raise Odd
    candidates.uniforms(*keys, noise.TOKEN, work.every, 1, work.noise)
    u, alone = work.noise[0], kept.with_whole(None)
    some = shortlist(work, alone, stage, lambda row: stage.target(row, u)) or listed(alone)
    weigh(work, some, stage)
    goal = float(stage.target(some.statistics(reads(stage, "target").row), u))
    if not goal > 0.0:
        raise Odd
    place = place_of(work, some, some.x, -1.0, goal, False)
    if place == ALL:  # rounding: the last one
        some = listed(alone)
        work.weights[: some.m] = 1.0
        place = place_of(work, some, some.x, -1.0, float(some.m), False)
    return int(some.ids[place])


def _race_of_groups(work: Room, stage: Draw, kept: Tokens, seed: Any, step: Any) -> int:
    """First the groups by their mass, then the tokens of the winner."""
    if isinstance(kept, Raw):
        groups_G, masses_G = kept.groups()
    else:
        count = candidates.groups(kept.x, kept.ids, kept.m, kept.top, work.starts, work.masses)
        groups_G, masses_G = kept.ids[work.starts[:count]] // GROUP, work.masses[:count]
        kept.groups = masses_G
    count = len(groups_G)
    candidates.uniforms(seed, step, noise.GROUP, groups_G, count, work.noise)
    winner = _race(stage, work.every[:count], masses_G, work.noise[:count])
    if isinstance(kept, Raw):
        ids_N, x_N = kept.of_group(int(groups_G[winner]))
    else:
        inside = slice(work.starts[winner], work.starts[winner + 1])
        ids_N, x_N = kept.ids[inside], kept.x[inside] - kept.top
    candidates.uniforms(seed, step, noise.TOKEN, ids_N, len(ids_N), work.noise)
    return _race(stage, ids_N, x_N, work.noise[: len(ids_N)])


def _race(stage: Draw, ids_N: Ids, x_N: Floats, u_N: Floats) -> int:
    """The id with the highest score; of equal ones the lowest, as ids ascend."""
    score_N = np.asarray(stage.score(x_N, u_N))
    place = score_N.argmax()
    if score_N[place] != score_N[place]:  # NaN
        raise Odd
    return int(ids_N[place])

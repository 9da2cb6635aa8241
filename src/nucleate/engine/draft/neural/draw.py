"""Tokens drawn from the scores of a proposer, in the way the sequence asks for. Knows no model and no draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nucleate.core import noise
from nucleate.engine.draft.draft import State
from nucleate.engine.draft.law import Law, choose, law_of
from nucleate.engine.draft.neural.race import race
from nucleate.models.llama import Floats

COLDEST = 1e-3
"""A temperature below this is 0: the scores of tokens, divided by it, would leave nothing to noise."""


class Drawn(NamedTuple):
    """A token, and the law it was drawn from if that is of use."""

    token: int  #: -1: there is none to draw
    law: Law | None


def draw(logits_RV: Floats, states: Sequence[State], places: Sequence[int]) -> list[Drawn]:
    """A token for each row of scores, at a place of the draft of a state.

    At temperature 0 the best one. With shared noise the one that the target would draw from these scores; else one by a
    number of the stream ``noise.DRAFT``, which belongs to the round and the place, with its law.
    """
    best_R = logits_RV.argmax(axis=1)
    drawn = [Drawn(int(best_R[row]), None) for row in range(len(states))]
    lost_R = ~np.isfinite(logits_RV[np.arange(len(best_R)), best_R])  # a NaN is the best, if there is one
    if lost_R.any():
        drawn = [Drawn(-1, None) if lost else one for one, lost in zip(drawn, lost_R, strict=True)]
    warm = [row for row, state in enumerate(states) if state.temperature >= COLDEST and drawn[row].token >= 0]
    together = [row for row in warm if states[row].shared]
    if together:
        steps = [states[row].position + places[row] for row in together]
        for row, token in zip(
            together, _shared(logits_RV[together], [states[row] for row in together], steps), strict=True
        ):
            drawn[row] = Drawn(token, None)
    for row in warm:
        if not states[row].shared:
            drawn[row] = _alone(logits_RV[row], states[row], places[row])
    return drawn


def _shared(logits_RV: Floats, states: Sequence[State], steps: Sequence[int]) -> list[int]:
    heat_R = np.array([state.temperature for state in states])
    seeds_R = np.array([state.seed for state in states], np.uint64)
    out_R = np.empty(len(states), np.int64)
    race(np.ascontiguousarray(logits_RV), heat_R, seeds_R, np.array(steps, np.uint64), out_R)
    tokens: list[int] = out_R.tolist()
    return tokens


def _alone(logits_V: Floats, state: State, place: int) -> Drawn:
    x_V = logits_V.astype(np.float64) / state.temperature
    law = law_of(np.exp(x_V - x_V.max()))
    if law is None:
        return Drawn(-1, None)
    u = noise.uniform(state.seed, state.position, noise.DRAFT, np.array([place]))[0]
    return Drawn(choose(law, float(u)), law)

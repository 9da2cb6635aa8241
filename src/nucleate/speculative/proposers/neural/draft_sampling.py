"""Samples draft tokens from the logits of a draft method, as the sequence requires."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import DRAFTS
from nucleate.models.llama.numpy_llama import Floats
from nucleate.sampling import noise
from nucleate.speculative.draft import DraftContext
from nucleate.speculative.draft_distribution import (
    Distribution,
    normalize,
    sample_inverse_cdf,
    sample_without_replacement,
)

COLDEST = 1e-3
"""A temperature below this is 0: the scores of tokens, divided by it, would leave nothing to noise."""


class SampledDrafts(NamedTuple):
    """A token that may come next, and the distribution it was sampled from, if needed: without its earlier siblings."""

    token: int  #: -1: there is none to draw
    distribution: Distribution | None
    chance: float = 1.0  #: of a sibling, as the proposer sees it


def draw(logits_RV: Floats, states: Sequence[DraftContext], places: Sequence[int]) -> list[SampledDrafts]:
    """A token for each row of scores, at a place of the draft of a state.

    At temperature 0 the best one. With shared noise the one that the target would draw from these scores; else one by a
    number of the stream ``noise.DRAFT``, which belongs to the round and the place, with its distribution.
    """
    best_R = logits_RV.argmax(axis=1)
    drawn = [SampledDrafts(int(best_R[row]), None) for row in range(len(states))]
    lost_R = ~np.isfinite(logits_RV[np.arange(len(best_R)), best_R])  # a NaN is the best, if there is one
    if lost_R.any():
        drawn = [SampledDrafts(-1, None) if lost else one for one, lost in zip(drawn, lost_R, strict=True)]
    warm = [row for row, state in enumerate(states) if state.temperature >= COLDEST and drawn[row].token >= 0]
    together = [row for row in warm if states[row].shared_noise]
    if together:
        steps = [states[row].position + places[row] for row in together]
        tokens_R1, _ = _shared(logits_RV[together], [states[row] for row in together], steps)
        for row, [token] in zip(together, tokens_R1.tolist(), strict=True):
            drawn[row] = SampledDrafts(token, None)
    for row in warm:
        if not states[row].shared_noise:
            drawn[row] = _alone(logits_RV[row], states[row], places[row])
    return drawn


class DraftQuery(NamedTuple):
    """What siblings are wanted for."""

    state: DraftContext
    place: int  #: how deep they are in the draft
    number: int  #: how many tokens of the draft were drawn before
    most: int


def draw_some(logits_RV: Floats, asked: Sequence[DraftQuery]) -> list[list[SampledDrafts]]:
    """Drawns for each row of scores, at most so many, in the order in which they are to be tried.

    At temperature 0 the best ones. With shared noise the one that the target would draw from these scores, and then
    those that it would draw if they were a little other. Else they are drawn without replacement: their number depends
    on none of them. Of each row the first is that of ``draw``.
    """
    found: list[list[SampledDrafts]] = []
    for logits_V, one in zip(logits_RV, asked, strict=True):
        if one.most < 1 or not np.isfinite(logits_V.max()):
            found.append([])
        elif one.state.temperature < COLDEST:
            found.append(_best(logits_V, one.most))
        elif one.state.shared_noise:
            found.append(_raced(logits_V, one))
        else:
            found.append(_drawn(logits_V, one))
    return found


def _best(logits_V: Floats, count: int) -> list[SampledDrafts]:
    x_V = np.exp((logits_V - logits_V.max()).astype(np.float64))
    x_V /= x_V.sum()
    best = np.argsort(-logits_V, kind="stable")[:count]
    return [SampledDrafts(int(token), None, float(x_V[token])) for token in best if x_V[token] > 0]


def _raced(logits_V: Floats, one: DraftQuery) -> list[SampledDrafts]:
    tokens_1N, behind_1N = _shared(logits_V[None], [one.state], [one.state.position + one.place], one.most)
    weights_N = np.exp(-behind_1N[0])
    chances = (weights_N / weights_N.sum()).tolist()
    return [
        SampledDrafts(token, None, chance)
        for token, chance in zip(tokens_1N[0].tolist(), chances, strict=True)
        if token >= 0
    ]


def _drawn(logits_V: Floats, one: DraftQuery) -> list[SampledDrafts]:
    distribution = _distribution(logits_V, one.state)
    if distribution is None:
        return []
    tokens, distributions = sample_without_replacement(distribution, _uniform(one.state, one.number, one.most))
    pairs = zip(tokens, distributions, strict=True)
    return [SampledDrafts(token, each, float(distribution[token])) for token, each in pairs]


def _shared(
    logits_RV: Floats, states: Sequence[DraftContext], steps: Sequence[int], count: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens [R, count], and how far each is behind the first."""
    heat_R = np.array([state.temperature for state in states])
    seeds_R = np.array([state.seed for state in states], np.uint64)
    out_RN, behind_RN = np.empty((len(states), count), np.int64), np.empty((len(states), count))
    given = np.ascontiguousarray(logits_RV), heat_R, seeds_R, np.array(steps, np.uint64)
    room = 2 * (-(-logits_RV.shape[1] // noise.GROUP_SIZE) + noise.GROUP_SIZE + 8)
    DRAFTS.race(*given, out_RN, behind_RN, np.empty(room))
    return out_RN, behind_RN


def _alone(logits_V: Floats, state: DraftContext, place: int) -> SampledDrafts:
    distribution = _distribution(logits_V, state)
    if distribution is None:
        return SampledDrafts(-1, None)
    return SampledDrafts(sample_inverse_cdf(distribution, _uniform(state, place, 1)[0]), distribution)


def _distribution(logits_V: Floats, state: DraftContext) -> Distribution | None:
    x_V = logits_V.astype(np.float64) / state.temperature
    return normalize(np.exp(x_V - x_V.max()))


def _uniform(state: DraftContext, first: int, count: int) -> list[float]:
    """Numbers of the round: those from ``first`` on."""
    numbers: list[float] = noise.uniform(
        state.seed, state.position, noise.DRAFT, np.arange(first, first + count)
    ).tolist()
    return numbers

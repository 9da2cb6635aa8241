"""The meaning of a pipeline, in float64: sort and walk, one row at a time, no tricks. Every other backend must agree.

Refuses to be fast, and to know any stage: it knows the shapes only.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.core import noise
from nucleate.core.parameter import ParameterError
from nucleate.core.stage import Draw, Floor, History, Pipeline, Prefix, Row, Scale, Shift, Token

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


class RowError(ValueError):
    """A row of logits from which no token can be drawn."""


class Survivors(NamedTuple):
    """The tokens that are still in, in the order: score descending, then id ascending."""

    ids_N: Ids
    x_N: Floats


def survivors(logits_V: NDArray[Any], stages: Pipeline, history: History = History()) -> Survivors:
    """The tokens left by every stage but the draw, with their final scores.

    logits_V: raw logits. Raises RowError for a NaN, a +inf, or no finite score, as given or after a stage.
    """
    x_V = np.asarray(logits_V, dtype=np.float32).astype(np.float64)
    ids_V = np.arange(len(x_V))
    kept = in_order(ids_V, check(ids_V, x_V))
    with np.errstate(all="ignore"):  # check reports what overflows, for its row
        for shifts, run in groupby(stages, lambda stage: isinstance(stage, Shift)):
            if shifts:
                kept = shift(kept, run, history, len(x_V))
            else:
                for stage in run:
                    kept = narrow(kept, stage)
    return kept


def check(ids_N: Ids, x_N: Floats, after: str = "") -> Floats:
    """The scores, or a RowError that says why no token can be drawn from them."""
    for bad_N, what in ((np.isnan(x_N), "NaN"), (x_N == np.inf, "+inf")):
        if bad_N.any():
            raise RowError(f"{what} at token {ids_N[bad_N.argmax()]}{after}")
    if not (x_N > -np.inf).any():
        raise RowError(f"every token is at -inf{after}")
    return x_N


def in_order(ids_N: Ids, x_N: Floats) -> Survivors:
    """Sort tokens by score, equal ones as they come; those at -inf are out."""
    order_N = np.argsort(-x_N, kind="stable")[: np.count_nonzero(x_N > -np.inf)]
    return Survivors(ids_N[order_N], x_N[order_N])


def shift(kept: Survivors, stages: Iterable[Any], history: History, size: int) -> Survivors:
    """Apply the rules of some Shifts, each to the tokens it touches; those at -inf are out."""
    ids_V, x_V = np.arange(size), np.full(size, -np.inf)
    x_V[kept.ids_N] = kept.x_N
    prompt_V, output_V = (np.bincount(np.asarray(ids, np.int64), minlength=size) for ids in history)
    for stage in stages:
        if stage.neutral:
            continue
        listed_V, is_listed_V = np.zeros(size), np.zeros(size, bool)
        for token, value in stage.listing(history).items():
            if not 0 <= token < size:
                field = next((p.name for p in stage.parameters.values()), stage.name)
                raise ParameterError(field, f"{field} names token {token}, but the vocabulary ends at {size - 1}")
            listed_V[token], is_listed_V[token] = value, True
        touched_V = {
            "seen": prompt_V + output_V > 0,
            "output": output_V > 0,
            "listed": is_listed_V,
            "unlisted": ~is_listed_V,
        }[stage.touches]
        shifted_V = stage.apply(x_V, Token(ids_V, prompt_V, output_V, listed_V))
        x_V = check(ids_V, np.where(touched_V & (x_V > -np.inf), shifted_V, x_V), f" after {stage.name}")
    return in_order(ids_V, x_V)


def narrow(kept: Survivors, stage: Any) -> Survivors:
    """Apply one Scale or truncation. The first token of the order always stays."""
    ids_N, x_N = kept
    if stage.greedy:
        return Survivors(ids_N[:1], x_N[:1])
    if stage.neutral or isinstance(stage, Draw):
        return kept
    row = statistics(x_N)
    match stage:
        case Scale():
            return in_order(ids_N, check(ids_N, stage.apply(x_N, row), f" after {stage.name}"))
        case Floor():
            keep_N = x_N >= stage.floor(row)
        case Prefix():
            keep_N = before(stage.weight(x_N, row)) < stage.target(row)
        case _:
            raise TypeError(f"the reference backend knows no shape for {stage!r}")
    keep_N[0] = True
    return Survivors(ids_N[keep_N], x_N[keep_N])


def statistics(x_N: Floats) -> Row:
    """The statistics of the scores that are in. Tokens at -inf are not in, so none may be passed."""
    top = x_N.max()
    below_N = np.maximum(x_N - top, np.finfo(np.float64).min)  # from the top, because large scores would cancel
    e_N = np.exp(below_N)
    mass = e_N.sum()
    entropy = np.log(mass) - (e_N * below_N).sum() / mass
    return Row(len(x_N), top, mass, (e_N * e_N).sum(), entropy, top + below_N.mean(), below_N.var())


def before(weight_N: Floats) -> Floats:
    """The sum of the weights strictly before each token."""
    return np.concatenate(([0.0], np.cumsum(weight_N)[:-1]))


def probabilities(logits_V: NDArray[Any], stages: Pipeline, history: History = History()) -> Floats:
    """The distribution the draw draws from, float64 [V]. A draw without noise puts all of it on one token."""
    ids_N, x_N = survivors(logits_V, stages, history)
    p_V = np.zeros(len(logits_V))
    with np.errstate(all="ignore"):
        if isinstance(stages[-1], Draw) and stages[-1].uniforms == "none":
            p_V[race(stages[-1], ids_N, x_N, np.zeros(len(x_N)))] = 1.0
        else:
            e_N = np.exp(x_N - x_N[0])
            p_V[ids_N] = e_N / e_N.sum()
    return p_V


def draw(logits_V: NDArray[Any], stages: Pipeline, seed: int, step: int, history: History = History()) -> int:
    """The token that the last stage, a Draw, picks."""
    ids_N, x_N = survivors(logits_V, stages, history)
    stage = stages[-1]
    if not isinstance(stage, Draw):
        raise TypeError(f"a pipeline that draws ends with a Draw, not with {stage!r}")
    with np.errstate(all="ignore"):
        if stage.uniforms == "one":
            row = statistics(x_N)
            u = noise.uniform(seed, step, noise.TOKEN, np.zeros(1, np.int64))[0]
            return int(ids_N[np.flatnonzero(before(stage.weight(x_N, row)) < stage.target(row, u))[-1]])
        if stage.uniforms == "each":
            group_N = ids_N // noise.GROUP_SIZE
            groups_G, mass_G = masses(group_N, x_N)
            winner = race(stage, groups_G, mass_G, noise.uniform(seed, step, noise.GROUP, groups_G))
            ids_N, x_N = ids_N[group_N == winner], x_N[group_N == winner]
            return race(stage, ids_N, x_N, noise.uniform(seed, step, noise.TOKEN, ids_N))
        return race(stage, ids_N, x_N, np.zeros(len(x_N)))


def masses(group_N: Ids, x_N: Floats) -> tuple[Ids, Floats]:
    """The groups that have tokens, and log sum exp of their scores."""
    order_N = np.argsort(group_N, kind="stable")
    groups_G, first_G, size_G = np.unique(group_N[order_N], return_index=True, return_counts=True)
    top_G = np.maximum.reduceat(x_N[order_N], first_G)
    e_N = np.exp(x_N[order_N] - np.repeat(top_G, size_G))
    return groups_G, top_G + np.log(np.add.reduceat(e_N, first_G))


def race(stage: Draw, ids_N: Ids, x_N: Floats, u_N: Floats) -> int:
    """The id with the highest score; of equal ones the lowest."""
    score_N = stage.score(x_N, u_N)
    return int(ids_N[score_N == score_N.max()].min())

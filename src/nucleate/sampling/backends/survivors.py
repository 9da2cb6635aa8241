"""The surviving tokens of a row in the reference backend."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.rule_inputs import RowStats

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


class RowError(ValueError):
    """A row of logits that cannot be sampled."""


class TotalMass(NamedTuple):
    """The tokens before the first truncation since the last Shift or Scale: maximum score, and sum of exp(x - top)."""

    top: float
    mass: float


class Survivors(NamedTuple):
    """The surviving tokens in rank order: score descending, then id ascending."""

    ids_N: Ids
    x_N: Floats
    total: TotalMass


def check_scores(ids_N: Ids, x_N: Floats, after: str = "") -> Floats:
    """The scores; raises RowError if they cannot be sampled."""
    for bad_N, name in ((np.isnan(x_N), "NaN"), (x_N == np.inf, "+inf")):
        if bad_N.any():
            raise RowError(f"{name} at token {ids_N[bad_N.argmax()]}{after}")
    if not (x_N > -np.inf).any():
        raise RowError(f"every token is at -inf{after}")
    return x_N


def ranked(ids_N: Ids, x_N: Floats) -> tuple[Ids, Floats]:
    """Sort tokens by score, stably; removes those at -inf."""
    order_N = np.argsort(-x_N, kind="stable")[: np.count_nonzero(x_N > -np.inf)]
    return ids_N[order_N], x_N[order_N]


def untruncated(ids_N: Ids, x_N: Floats) -> Survivors:
    """Tokens in rank order, before any truncation."""
    return Survivors(ids_N, x_N, TotalMass(float(x_N[0]), float(np.exp(x_N - x_N[0]).sum())))


def statistics(x_N: Floats, total: TotalMass | None = None) -> RowStats:
    """The statistics of the scores of surviving tokens; none may be -inf."""
    top = x_N.max()
    d_N = np.maximum(x_N - top, np.finfo(np.float64).min)  # relative, because large scores would cancel
    e_N = np.exp(d_N)
    mass = e_N.sum()
    entropy = np.log(mass) - (e_N * d_N).sum() / mass
    total_mass = mass if total is None else max(total.mass * np.exp(total.top - top), mass)
    return RowStats(len(x_N), top, mass, (e_N * e_N).sum(), entropy, top + d_N.mean(), d_N.var(), total_mass)

"""Shifts of a row that has not been scaled or cut: edited tokens are taken out of a copy of it, and kept in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.backends.cpu.generic import kernels
from nucleate.backends.cpu.generic.listed import Floats, Ids, Undecided
from nucleate.backends.cpu.generic.uncut import Uncut
from nucleate.core.history import Counts, Past
from nucleate.core.stage import Shift, Token


def shift(given: Uncut, stage: Shift, past: Past) -> Uncut:
    """The row after a Shift. Raises Undecided where the reference has something to say; what a listing raises."""
    match stage.touches:
        case "seen" | "output":
            counts = past.counts(stage.window)
            if stage.touches == "output":
                counts = Counts(*(column[counts.output_K > 0] for column in counts))
            return _edited(given, stage, counts.ids_K, (counts.prompt_K, counts.output_K), 0.0)
        case "listed":
            ids_K, listed_K = _listed(past.listing(stage), given.work.size)
            return _edited(given, stage, ids_K, _counts(past, stage, ids_K), listed_K)
        case "unlisted" if bans(stage):
            return _only(given, _listed(past.listing(stage), given.work.size)[0])
        case "masked" if past.mask is None:
            return given
        case "masked" if bans(stage):
            return _masked(given, np.ascontiguousarray(past.mask, np.int32))
    raise Undecided  # a rule of its own over most of the vocabulary


def _edited(given: Uncut, stage: Shift, ids_K: Ids, counts_K: tuple[Any, Any], listed_K: Any) -> Uncut:
    """The row after a rule for some tokens."""
    x_K = given.scores(ids_K)
    shifted_K = np.asarray(stage.apply(x_K, Token(ids_K, *counts_K, listed_K)))
    changed_K = (x_K > -np.inf) & (shifted_K != x_K)
    if not changed_K.any():
        return given
    ids_K, shifted_K = ids_K[changed_K], np.broadcast_to(shifted_K, x_K.shape)[changed_K]
    if not shifted_K.max() < np.inf:
        raise Undecided
    row_V = given.work.row()
    np.copyto(row_V, given.row_V)
    row_V[ids_K] = -np.inf
    stay_K = ~np.isin(given.ids_K, ids_K)
    inside_K = shifted_K > -np.inf
    ids_K = np.concatenate((given.ids_K[stay_K], ids_K[inside_K]))
    x_K = np.concatenate((given.x_K[stay_K], shifted_K[inside_K]))
    by_id_K = np.argsort(ids_K)
    return Uncut(given.work, row_V, ids_K[by_id_K], x_K[by_id_K])


def _only(given: Uncut, ids_K: Ids) -> Uncut:
    """The row without the tokens that are not in a list."""
    row_V, stay_K = given.work.row(), np.isin(given.ids_K, ids_K)
    row_V.fill(-np.inf)
    row_V[ids_K] = given.row_V[ids_K]
    return Uncut(given.work, row_V, given.ids_K[stay_K], given.x_K[stay_K])


def _masked(given: Uncut, words_W: NDArray[np.int32]) -> Uncut:
    """The row without the tokens whose bit is 0."""
    row_V, ids_K = given.work.row(), given.ids_K
    np.copyto(row_V, given.row_V)
    kernels.forbid(row_V, words_W)
    stay_K = (words_W[ids_K >> 5] >> (ids_K & 31)) & 1 == 1
    return Uncut(given.work, row_V, ids_K[stay_K], given.x_K[stay_K])


def _listed(listing: Mapping[int, float], size: int) -> tuple[Ids, Floats]:
    count = len(listing)
    ids_K = np.fromiter(listing, np.int64, count)
    if count and not 0 <= ids_K.min() <= ids_K.max() < size:
        raise Undecided
    return ids_K, np.fromiter(listing.values(), np.float64, count)


def _counts(past: Past, stage: Shift, ids_K: Ids) -> tuple[Any, Any]:
    """How often listed tokens occurred, for a rule that asks."""
    if not {"prompt_count", "output_count"} & set(type(stage).apply.__code__.co_names):
        return 0.0, 0.0
    counts = past.counts(stage.window)
    place = {token: i for i, token in enumerate(counts.ids_K.tolist())}
    found = [place.get(token, -1) for token in ids_K.tolist()]
    return tuple(np.append(column, 0)[found] for column in (counts.prompt_K, counts.output_K))  # type: ignore[return-value]


def bans(stage: Shift) -> bool:
    """Whether the rule takes out whatever it touches."""
    some = np.array([-1e30, -1.0, 0.0, 1.0, 1e30])
    return bool(np.all(stage.apply(some, Token(np.arange(5), np.zeros(5), np.zeros(5), np.zeros(5))) == -np.inf))

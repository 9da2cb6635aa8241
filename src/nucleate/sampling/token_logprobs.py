"""Log-probabilities and ranks of a few tokens of a row, without sorting the row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs, TokenLogprob

BLOCK_ELEMENTS = 1 << 18
"""Scores that ``row_logprobs`` processes at once. With smaller blocks it waits for the GIL more often."""


def logprobs(
    ids_N: NDArray[np.int64], x_N: NDArray[Any], chosen: int, top: int = 0, requested: tuple[int, ...] = ()
) -> StepLogprobs:
    """The logprobs of the sampled token, of the ``top`` most likely tokens and of the requested ones.

    ids_N, x_N: ids and scores of the surviving tokens, in any order; a score of -inf counts as not surviving.
    """
    x_N = np.asarray(x_N, np.float64)
    log_p_N = x_N - x_N.max()  # in two steps, as 1e30 + log(mass) would round to 1e30
    log_p_N -= np.log(np.exp(log_p_N).sum())

    def one(token: int) -> TokenLogprob:
        found = np.flatnonzero(ids_N == token)
        if not len(found) or x_N[found[0]] == -np.inf:
            return TokenLogprob(token, -np.inf, None)
        x = x_N[found[0]]
        ahead = np.count_nonzero(x_N > x) + np.count_nonzero((x_N == x) & (ids_N < token))
        return TokenLogprob(token, float(log_p_N[found[0]]), 1 + int(ahead))

    count = min(top, int(np.count_nonzero(x_N > -np.inf)))
    highest = np.zeros(0, np.int64)
    if count:
        highest = np.flatnonzero(x_N >= np.partition(x_N, -count)[-count])  # at least ``count``: includes ties
    order = highest[np.lexsort((ids_N[highest], -x_N[highest]))][:count]
    ranked = enumerate(zip(ids_N[order].tolist(), log_p_N[order].tolist(), strict=True), 1)
    most_likely = tuple(TokenLogprob(token, logprob, rank) for rank, (token, logprob) in ranked)
    return StepLogprobs(one(chosen), most_likely, tuple(one(token) for token in requested))


def row_logprobs(
    logits_TV: Iterable[NDArray[Any]], chosen_T: Sequence[int], top: int = 0, requested: tuple[int, ...] = ()
) -> list[StepLogprobs | None]:
    """``logprobs`` of whole rows, many at once; None for a row with a NaN, +inf or no finite score."""
    rows, results = iter(logits_TV), list[StepLogprobs | None]()
    while block := list(islice(rows, 1)):
        block += islice(rows, max(1, BLOCK_ELEMENTS // max(len(block[0]), 1)) - 1)
        chosen = chosen_T[len(results) : len(results) + len(block)]
        results += _block_logprobs(np.array(block, np.float64), np.asarray(chosen), top, requested)
    return results


def _block_logprobs(
    x_TV: NDArray[np.float64], chosen_T: NDArray[np.integer[Any]], top: int, requested: tuple[int, ...]
) -> list[StepLogprobs | None]:
    ids_V, max_T, all_T = np.arange(x_TV.shape[1]), x_TV.max(axis=1), np.arange(len(x_TV))
    with np.errstate(invalid="ignore"):  # rows without a distribution
        log_p_TV = x_TV - max_T[:, None]
        log_p_TV -= np.log(np.exp(log_p_TV).sum(axis=1))[:, None]

    def each(ids_T: NDArray[np.integer[Any]]) -> list[TokenLogprob]:
        own_T = x_TV[all_T, ids_T]
        ahead_T = np.count_nonzero(x_TV > own_T[:, None], axis=1)
        ahead_T += np.count_nonzero((x_TV == own_T[:, None]) & (ids_V < ids_T[:, None]), axis=1)
        values = zip(ids_T.tolist(), log_p_TV[all_T, ids_T].tolist(), (1 + ahead_T).tolist(), strict=True)
        return [TokenLogprob(one, p, rank if p > -np.inf else None) for one, p, rank in values]

    most_likely: list[list[TokenLogprob]] = [[] for _ in all_T]
    if top:
        count = min(top, len(ids_V))
        threshold_T = np.partition(x_TV, -count, axis=1)[:, -count]
        row_N, id_N = np.nonzero((x_TV >= threshold_T[:, None]) & (x_TV > -np.inf))  # at least ``count``: with ties
        order_N = np.lexsort((id_N, -x_TV[row_N, id_N], row_N))
        row_N, id_N = row_N[order_N], id_N[order_N]
        for row, token, value in zip(row_N.tolist(), id_N.tolist(), log_p_TV[row_N, id_N].tolist(), strict=True):
            if len(most_likely[row]) < count:
                most_likely[row].append(TokenLogprob(token, value, 1 + len(most_likely[row])))
    chosen, others = each(chosen_T), [each(np.full_like(chosen_T, token)) for token in requested]
    return [
        StepLogprobs(chosen[row], tuple(most_likely[row]), tuple(column[row] for column in others)) if valid else None
        for row, valid in enumerate(np.isfinite(max_T).tolist())
    ]

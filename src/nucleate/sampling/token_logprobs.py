"""Log-probabilities and ranks of a few tokens of a row, without sorting the row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs, TokenLogprob


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
    """``logprobs`` of whole rows; None for a row with a NaN, +inf or no finite score."""
    return [
        logprobs(np.arange(len(logits_V)), logits_V, int(chosen), top, requested)
        if np.isfinite(logits_V.max())
        else None
        for logits_V, chosen in zip(logits_TV, chosen_T, strict=True)
    ]

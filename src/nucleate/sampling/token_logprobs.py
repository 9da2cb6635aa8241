"""Log-probabilities and ranks of a few tokens of a row, without sorting the row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs, TokenLogprob


def logprobs(
    ids_N: NDArray[np.int64], x_N: NDArray[Any], chosen: int, top: int = 0, requested: tuple[int, ...] = ()
) -> StepLogprobs:
    """ids_N, x_N: the tokens that are in, in any order, and their scores; one at -inf is as good as not in."""
    x_N = np.asarray(x_N, np.float64)
    log_p_N = x_N - x_N.max()  # in two steps: to a score of 1e30 nothing can be added
    log_p_N -= np.log(np.exp(log_p_N).sum())

    def one(token: int) -> TokenLogprob:
        place = np.flatnonzero(ids_N == token)
        if not len(place) or x_N[place[0]] == -np.inf:
            return TokenLogprob(token, -np.inf, None)
        x = x_N[place[0]]
        ahead = np.count_nonzero(x_N > x) + np.count_nonzero((x_N == x) & (ids_N < token))
        return TokenLogprob(token, float(log_p_N[place[0]]), 1 + int(ahead))

    count = min(top, int(np.count_nonzero(x_N > -np.inf)))
    near = np.zeros(0, np.int64)
    if count:
        near = np.flatnonzero(x_N >= np.partition(x_N, -count)[-count])  # the best, and all that equal the last of them
    order = near[np.lexsort((ids_N[near], -x_N[near]))][:count]
    ranked = enumerate(zip(ids_N[order].tolist(), log_p_N[order].tolist(), strict=True), 1)
    likeliest = tuple(TokenLogprob(token, logprob, rank) for rank, (token, logprob) in ranked)
    return StepLogprobs(one(chosen), likeliest, tuple(one(token) for token in requested))

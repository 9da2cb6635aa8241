"""Log-probabilities and ranks of a few tokens of a row, compiled: the same as ``backends.logprobs``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.backends.cpu.compile import jit, kernel
from nucleate.backends.cpu.special.chain import prepared
from nucleate.backends.cpu.special.cuts import LOWEST, exponent_of, kth_cut, read, weigh
from nucleate.backends.cpu.special.select import count, gather, key, next_up
from nucleate.backends.cpu.special.share import keep_first
from nucleate.backends.cpu.special.work import carve


@kernel("int64(int64, int64, int64, int64[::1], int64, int64[::1], float64[::1], int64[::1], float64[::1])")
def report(
    address: Any, kind: Any, size: Any, asked: Any, best: Any, ids: Any, logprobs: Any, ranks: Any, room: Any
) -> Any:
    """Fill in the logprob and rank (0: it is not in) of each asked token, then ids and logprobs of the ``best``.

    address, kind, size, room: as of ``chain.draw_rows``. asked: int64 [K]. ids: int64 [best]; logprobs: float64
    [K + best]; ranks: int64 [K]. Returns how many best ones there are.
    """
    work = carve(room, size)
    row, _ = prepared(address, kind, 0, 0, 0, size, work)
    x = row.x
    top = read(row, work.tops)
    log_mass = math.log(weigh(row, exponent_of(top, 1.0), work))
    for i in range(asked.size):
        score = x[asked[i]] if 0 <= asked[i] < x.size else np.float32(-np.inf)
        logprobs[i] = np.float64(score) - np.float64(top) - log_mass
        ranks[i] = 1 + before(row, asked[i], work) if score > -np.inf else 0
    inside = count(row, work.tops, LOWEST)
    wanted = min(best, inside)
    if wanted == 0:
        return 0
    cut = LOWEST if wanted == inside else max(LOWEST, kth_cut(row, top, wanted, work)[0])
    found = gather(row, work.tops, cut, work.ids, work.keys)
    if wanted < found:
        found = keep_first(x, work.ids, work.weights, work.others, found, np.float64(wanted), False)
    for i in range(found):
        work.keys[i] = -key(x[work.ids[i]], work.ids[i])
    order = np.argsort(work.keys[:found])
    for i in range(found):
        ids[i] = work.ids[order[i]]
        logprobs[asked.size + i] = np.float64(x[ids[i]]) - np.float64(top) - log_mass
    return found


@jit
def before(row: Any, token: Any, work: Any) -> Any:
    """How many tokens come before one in the order."""
    score = row.x[token]
    higher = count(row, work.tops, next_up(score))
    if count(row, work.tops, score) > higher + 1:
        for other in range(token):
            if row.x[other] == score:
                higher += 1
    return higher

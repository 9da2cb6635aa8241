"""Log-probabilities and ranks of a few tokens of a row, compiled: the same as ``backends.logprobs``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.backends.cpu.chain import LOWEST, Exponent, at_most, carve, read, weigh
from nucleate.backends.cpu.compile import jit, kernel
from nucleate.backends.cpu.select import beside, count, gather, keep_first, key

LOG2_E = 1.4426950408889634


@kernel
def report(x: Any, asked: Any, best: Any, ids: Any, logprobs: Any, ranks: Any, room: Any) -> Any:
    """Fill in the logprob and rank (0: it is not in) of each asked token, then ids and logprobs of the ``best``.

    x: float32 [N], padded with -inf to whole groups. asked: int64 [K]. ids: int64 [best]; logprobs: float64 [K + best];
    ranks: int64 [K]. room: as of ``chain.draw_rows``. Returns how many best ones there are.
    """
    work = carve(room, x.size)
    top = read(x, work.tops)
    high = np.float32(LOG2_E)
    exponent = Exponent(top, high, np.float32(LOG2_E - np.float64(high)), np.float32(-126.0 / LOG2_E))
    log_mass = math.log(weigh(x, exponent, work))
    for i in range(asked.size):
        score = x[asked[i]]
        logprobs[i] = np.float64(score) - np.float64(top) - log_mass
        ranks[i] = 1 + before(x, asked[i], work) if score > -np.inf else 0
    inside = count(x, work.tops, LOWEST)
    wanted = min(best, inside)
    if wanted == 0:
        return 0
    cut = LOWEST if wanted == inside else max(LOWEST, np.float32(at_most(x, top, wanted, work)))
    found = gather(x, work.tops, cut, work.ids)
    if wanted < found:
        found = keep_first(x, work.ids, work.weights, work.keys, work.others, found, np.float64(wanted), False)
    for i in range(found):
        work.keys[i] = -key(x[work.ids[i]], work.ids[i])
    order = np.argsort(work.keys[:found])
    for i in range(found):
        ids[i] = work.ids[order[i]]
        logprobs[asked.size + i] = np.float64(x[ids[i]]) - np.float64(top) - log_mass
    return found


@jit
def before(x: Any, token: Any, work: Any) -> Any:
    """How many tokens come before one in the order."""
    score = x[token]
    higher = count(x, work.tops, beside(score, 1))
    if count(x, work.tops, score) > higher + 1:
        for other in range(token):
            if x[other] == score:
                higher += 1
    return higher

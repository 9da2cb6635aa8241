"""Log-probabilities and ranks of a few tokens of a row, compiled: the same as ``backends.logprobs``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.backends.cpu.compile import jit, kernel
from nucleate.backends.cpu.special.cuts import kth_bound, kth_counted, sure
from nucleate.backends.cpu.special.edits import take
from nucleate.backends.cpu.special.select import FEW, count, gather, key, next_up
from nucleate.backends.cpu.special.share import BY_NUMBER, keep_first
from nucleate.backends.cpu.special.weights import LOWEST, exponent_of, weigh
from nucleate.backends.cpu.special.work import carve, score


@kernel("int64(int64, int64, int64, int64[::1], int64, int64[::1], float64[::1], int64[::1], float64[::1])")
def report(
    address: Any, kind: Any, size: Any, asked: Any, best: Any, ids: Any, logprobs: Any, ranks: Any, room: Any
) -> Any:
    """Fill in the logprob and rank (0: it is not in) of each asked token, then ids and logprobs of the ``best``.

    address, kind, size, room: as of ``chain.draw_rows``. asked: int64 [K]. ids: int64 [best]; logprobs: float64
    [K + best]; ranks: int64 [K]. Returns how many best ones there are.
    """
    work = carve(room, size)
    top = take(address, kind, size, 0, 0, 0, work)
    log_mass = math.log(weigh(LOWEST, exponent_of(top, 1.0), 1.0, False, work))
    for i in range(asked.size):
        x = score(work, asked[i]) if 0 <= asked[i] < size else np.float32(-np.inf)
        logprobs[i] = np.float64(x) - np.float64(top) - log_mass
        ranks[i] = 1 + before(asked[i], work) if x > -np.inf else 0
    inside = count(LOWEST, work)
    wanted = min(best, inside)
    if wanted == 0:
        return 0
    cut = LOWEST if wanted == inside else kth_bound(wanted, work)
    found = gather(cut, work)
    if not sure(wanted, work) and not wanted <= found <= wanted + FEW:
        found = gather(kth_counted(top, wanted, work), work)
    if wanted < found:
        found = keep_first(found, np.float64(wanted), BY_NUMBER, work)
    sort(found, work)
    for i in range(found):
        ids[i] = work.ids[i]
        logprobs[asked.size + i] = work.scores[i] - np.float64(top) - log_mass
    return found


@jit
def before(token: Any, work: Any) -> Any:
    """How many tokens come before one in the order."""
    x = score(work, token)
    higher = count(next_up(x), work)
    if count(x, work) > higher + 1:
        for other in range(token):
            if score(work, other) == x:
                higher += 1
    return higher


@jit
def sort(n: Any, work: Any) -> None:
    """Put n candidates in order (Shell's sort: they may be few or very many)."""
    for i in range(n):
        work.earlier[i] = key(np.float32(work.scores[i]), work.ids[i])
    gap = 1
    while gap < n // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, n):
            place, own, token, x = i, work.earlier[i], work.ids[i], work.scores[i]
            while place >= gap and work.earlier[place - gap] < own:
                earlier = place - gap
                work.earlier[place], work.ids[place] = work.earlier[earlier], work.ids[earlier]
                work.scores[place] = work.scores[earlier]
                place = earlier
            work.earlier[place], work.ids[place], work.scores[place] = own, token, x
        gap //= 3

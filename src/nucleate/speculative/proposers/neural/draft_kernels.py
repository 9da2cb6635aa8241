"""The target's Gumbel draw (``stages/gumbel.py``) from scores and a temperature alone, compiled. Knows no sequence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.jit.compiler import inline, kernel
from nucleate.sampling.backends.numba.philox import uniforms
from nucleate.sampling.noise import GROUP, GROUP_SIZE, TOKEN


@inline
def _gumbel(u: Any) -> Any:
    return -math.log(-math.log1p(-u))


@inline
def _enter(token: Any, behind: Any, tokens_N: Any, behind_N: Any) -> None:
    """Take a token in where it belongs; of equal ones the first stays before."""
    n = len(tokens_N)
    while n > 0 and behind < behind_N[n - 1]:
        n -= 1
        if n + 1 < len(tokens_N):
            tokens_N[n + 1], behind_N[n + 1] = tokens_N[n], behind_N[n]
        tokens_N[n], behind_N[n] = token, behind


@kernel("void(float32[:, ::1], float64[::1], uint64[::1], uint64[::1], int64[:, ::1], float64[:, ::1], float64[::1])")
def race(logits_RV: Any, heat_R: Any, seeds_R: Any, steps_R: Any, out_RN: Any, behind_RN: Any, room: Any) -> None:
    """The token of each row: first the group with the best mass and noise, then the best of it. Then those that would
    be drawn if the scores were a little other: by how far their group is behind the first, and they in their group.

    Scores are finite or -inf, with a finite one in each row; seeds and steps are uint64. Where there are no more tokens
    it is -1, with inf. room: float64 [2 * groups + 528].
    """
    rows, size = logits_RV.shape
    groups = (size + GROUP_SIZE - 1) // GROUP_SIZE
    score_G, score_T, u = room[:groups], room[groups : groups + GROUP_SIZE], room[groups + GROUP_SIZE :]
    for r in range(rows):
        scale, top = 1.0 / heat_R[r], -np.inf
        for v in range(size):
            top = max(top, np.float64(logits_RV[r, v]))
        uniforms(u, groups, seeds_R[r], steps_R[r], GROUP, 0)
        first = -np.inf
        for g in range(groups):
            mass = 0.0
            for v in range(g * GROUP_SIZE, min(size, (g + 1) * GROUP_SIZE)):
                mass += math.exp((np.float64(logits_RV[r, v]) - top) * scale)
            score_G[g] = math.log(mass) + _gumbel(u[g]) if mass > 0 else -np.inf
            first = max(first, score_G[g])
        out_RN[r], behind_RN[r] = -1, np.inf
        for _ in range(min(groups, out_RN.shape[1])):
            g = int(score_G.argmax())
            short = first - score_G[g]
            score_G[g] = -np.inf
            if not short < behind_RN[r, out_RN.shape[1] - 1]:
                break
            best, low = -np.inf, g * GROUP_SIZE
            count = min(size - low, GROUP_SIZE)
            uniforms(u, count, seeds_R[r], steps_R[r], TOKEN, low)
            for i in range(count):
                score_T[i] = (np.float64(logits_RV[r, low + i]) - top) * scale + _gumbel(u[i])
                best = max(best, score_T[i])
            for i in range(count):
                if score_T[i] > -np.inf:
                    _enter(low + i, short + best - score_T[i], out_RN[r], behind_RN[r])

"""Compiled Gumbel-max sampling with the target's noise (``stages/selection.py``)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.jit.compiler import inline, kernel
from nucleate.sampling.cpu.kernel_maths import uniforms
from nucleate.sampling.noise import GROUP, GROUP_SIZE, TOKEN


@inline
def _gumbel(u: Any) -> Any:
    return -math.log(-math.log1p(-u))


@inline
def _insert(token: Any, gap: Any, tokens_N: Any, gaps_N: Any) -> None:
    """Insert a token into a list sorted by gap; ties stay in order."""
    n = len(tokens_N)
    while n > 0 and gap < gaps_N[n - 1]:
        n -= 1
        if n + 1 < len(tokens_N):
            tokens_N[n + 1], gaps_N[n + 1] = tokens_N[n], gaps_N[n]
        tokens_N[n], gaps_N[n] = token, gap


@kernel("void(float32[:, ::1], float64[::1], uint64[::1], uint64[::1], int64[:, ::1], float64[:, ::1], float64[::1])")
def gumbel_max(
    logits_RV: Any, temperatures_R: Any, seeds_R: Any, steps_R: Any, out_RN: Any, gaps_RN: Any, workspace: Any
) -> None:
    """Sample the token of each row, and the runners-up: the group of highest weight plus noise, then its best token.

    A token's gap is how far its group is behind the best group, plus how far the token is behind the best one of its
    group. out_RN: tokens [R, N] in the order of their gaps; gaps_RN: the gaps; -1 and inf if there are fewer tokens.

    Logits are finite or -inf, with a finite one in each row. workspace: float64 [2 * groups + 528].
    """
    rows, size = logits_RV.shape
    groups = (size + GROUP_SIZE - 1) // GROUP_SIZE
    score_G, score_T, u = workspace[:groups], workspace[groups : groups + GROUP_SIZE], workspace[groups + GROUP_SIZE :]
    for r in range(rows):
        scale, max_logit = 1.0 / temperatures_R[r], -np.inf
        for v in range(size):
            max_logit = max(max_logit, np.float64(logits_RV[r, v]))
        uniforms(u, groups, seeds_R[r], steps_R[r], GROUP, 0)
        best_group = -np.inf
        for g in range(groups):
            weight = 0.0
            for v in range(g * GROUP_SIZE, min(size, (g + 1) * GROUP_SIZE)):
                weight += math.exp((np.float64(logits_RV[r, v]) - max_logit) * scale)
            score_G[g] = math.log(weight) + _gumbel(u[g]) if weight > 0 else -np.inf
            best_group = max(best_group, score_G[g])
        out_RN[r], gaps_RN[r] = -1, np.inf
        for _ in range(min(groups, out_RN.shape[1])):
            g = int(score_G.argmax())
            group_gap = best_group - score_G[g]
            score_G[g] = -np.inf
            if not group_gap < gaps_RN[r, out_RN.shape[1] - 1]:
                break
            best, low = -np.inf, g * GROUP_SIZE
            count = min(size - low, GROUP_SIZE)
            uniforms(u, count, seeds_R[r], steps_R[r], TOKEN, low)
            for i in range(count):
                score_T[i] = (np.float64(logits_RV[r, low + i]) - max_logit) * scale + _gumbel(u[i])
                best = max(best, score_T[i])
            for i in range(count):
                if score_T[i] > -np.inf:
                    _insert(low + i, group_gap + best - score_T[i], out_RN[r], gaps_RN[r])

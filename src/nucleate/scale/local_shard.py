"""The columns of the logits that one rank has: their scores, the summaries of their groups, and candidates.

Everything runs on the device of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.sampling import noise
from nucleate.sampling.noise import GROUP_SIZE
from nucleate.scale.row_shifts import RowShifts

LOWEST = float(np.finfo(np.float32).min)
CONTENDING = 1e-9
"""Tokens whose keys in a draw are this close to the best one are all sent; float64 keys err by less than 1e-12."""


class LocalShard:
    """The scores of some rows on one shard, after their Shifts.

    raw_RN: float32 [R, N], the logits. first: the id of the first one. shifts_R: of each row, None if it has none.
    exact: the rows whose masses are needed. Rows that cannot be computed are NaN.
    """

    def __init__(
        self, raw_RN: torch.Tensor, first: int, shifts_R: Sequence[RowShifts | None], exact: Sequence[int]
    ) -> None:
        self.raw_RN, self.first, self._exact = raw_RN, first, {row: at for at, row in enumerate(exact)}
        self.x_RN = raw_RN
        self.exact_MN = raw_RN[list(exact)].double() if exact else raw_RN[:0].double()
        if raw_RN.shape[1] and any(shifts is not None for shifts in shifts_R):
            self.x_RN = raw_RN.clone()
            for row, shifts in enumerate(shifts_R):
                if shifts is not None:
                    shifted_N = self._shifted(raw_RN[row], shifts)
                    self.x_RN[row] = shifted_N.float()
                    if row in self._exact:
                        self.exact_MN[self._exact[row]] = shifted_N

    def _shifted(self, raw_N: torch.Tensor, shifts: RowShifts) -> torch.Tensor:
        x_N, end = raw_N.double(), self.first + len(raw_N)
        if not raw_N.max() < torch.inf:
            return x_N.fill_(torch.nan)
        try:
            ids_K, banned_N = shifts.touched(self.first, end), shifts.banned(self.first, end)
            at_K = torch.from_numpy(ids_K - self.first).to(x_N.device)
            shifted_K = torch.from_numpy(shifts.apply(x_N[at_K].cpu().numpy(), ids_K)).to(x_N.device)
        except Exception:  # noqa: BLE001  # a user-defined stage may raise anything; the whole row reports it
            return x_N.fill_(torch.nan)
        if banned_N is not None:
            x_N.masked_fill_(torch.from_numpy(banned_N).to(x_N.device), -torch.inf)
        x_N[at_K] = shifted_K
        return x_N

    def maxima(self) -> torch.Tensor:
        """The maximum of each part of a group, float32 [R, P]."""
        parts = [part.amax(-1) for part in _parts(self.x_RN, self.first)]
        return torch.cat(parts, 1) if parts else self.x_RN[:, :0]

    def masses(self, maxima_RP: torch.Tensor, t_M: NDArray[np.float64]) -> torch.Tensor:
        """The sum of exp((x - maximum) / t) of each part of a group, float64 [M, P], of the exact rows."""
        if not len(self.exact_MN) or not self.exact_MN.shape[1]:
            return self.exact_MN[:, : maxima_RP.shape[1]]
        top_MP = maxima_RP[list(self._exact)].double()
        top_MP = torch.where(top_MP == -torch.inf, 0.0, top_MP)
        t_M11 = torch.from_numpy(t_M).to(self.exact_MN.device)[:, None, None]
        sums, at = [], 0
        for part in _parts(self.exact_MN, self.first):
            d = part - top_MP[:, at : at + part.shape[1], None]
            sums.append(d.div_(t_M11).clamp_(max=1.0).exp_().sum(-1))  # above 0 only by rounding of the maximum
            at += part.shape[1]
        return torch.cat(sums, 1)

    def above(self, threshold_R: NDArray[np.float32], k_R: NDArray[np.int64]) -> tuple[NDArray[np.int64], Any, Any]:
        """The finite tokens at or above a threshold per row: their number per row, columns and raw scores, row by row.

        k_R: raise the threshold to the local k-th score; 0: do not.
        """
        low_R = np.maximum(threshold_R, LOWEST)
        for row in np.flatnonzero(k_R):
            k = min(int(k_R[row]), self.x_RN.shape[1])
            if k:
                low_R[row] = max(low_R[row], self.x_RN[row].topk(k).values[-1].item())
        reached_RN = self.x_RN >= torch.from_numpy(low_R).to(self.x_RN.device)[:, None]
        if reached_RN.is_cpu:  # NumPy finds them faster
            at_K = torch.from_numpy(np.flatnonzero(reached_RN.numpy()))
        else:
            at_K = reached_RN.flatten().nonzero().flatten()
        columns = max(self.x_RN.shape[1], 1)
        row_K, column_K = at_K // columns, at_K % columns
        counts_R = torch.bincount(row_K, minlength=len(low_R)).cpu().numpy()
        return counts_R, column_K, self.raw_RN[row_K, column_K]

    def contenders(
        self, rows: Sequence[int], groups: Sequence[int], t_M: NDArray[np.float64], keys: Sequence[tuple[int, int]]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """The tokens that may win the draw inside a group, for some of the exact rows: columns and raw scores.

        keys: the seed and step of the noise, per row.
        """
        if not rows or not self.x_RN.shape[1]:
            return [(np.zeros(0, np.int64), np.zeros(0, np.float32))] * len(rows)
        ids_M = np.arange(GROUP_SIZE)[None] + GROUP_SIZE * np.array(groups)[:, None]
        column_M = ids_M - self.first
        inside_M = (column_M >= 0) & (column_M < self.x_RN.shape[1])
        column_M = np.where(inside_M, column_M, 0)
        at, columns = torch.tensor([self._exact[row] for row in rows]), torch.from_numpy(column_M)
        device = self.x_RN.device
        x_M = self.exact_MN[at.to(device)[:, None], columns.to(device)].cpu().numpy()
        raw_M = self.raw_RN[torch.tensor(rows).to(device)[:, None], columns.to(device)].cpu().numpy()
        x_M = np.where(inside_M, x_M, -np.inf)
        seeds, steps = (np.array(column, np.uint64)[:, None] for column in zip(*keys, strict=True))
        key_M = x_M / t_M[:, None] + noise.gumbel(noise.uniforms(seeds, steps, noise.TOKEN, ids_M))
        best_M = (key_M >= key_M.max(1, keepdims=True) - CONTENDING * np.maximum(1.0, np.abs(key_M))) & (x_M > -np.inf)
        return [(column_M[i, best_M[i]], raw_M[i, best_M[i]]) for i in range(len(rows))]


def _parts(x_RN: torch.Tensor, first: int) -> list[torch.Tensor]:
    """The columns by groups of 256 token ids, as views [R, P, W]: the end of a group, whole ones, the start of one."""
    count = x_RN.shape[1]
    head = min(-first % GROUP_SIZE, count)
    end = head + (count - head) // GROUP_SIZE * GROUP_SIZE
    parts = [x_RN[:, None, :head]] if head else []
    if end > head:
        parts.append(x_RN[:, head:end].unflatten(1, (-1, GROUP_SIZE)))
    return [*parts, x_RN[:, None, end:]] if end < count else parts

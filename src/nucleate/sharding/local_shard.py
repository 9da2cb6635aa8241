"""The columns of the logits that one rank has: their scores, the summaries of their groups, and candidates.

Rows stay on the device of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.sampling import noise
from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sharding.group_sums import Key, masses, parts, race
from nucleate.sharding.row_shifts import RowShifts

LOWEST = float(np.finfo(np.float32).min)

Shifted = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Columns, and their scores, which float32 may not represent."""


class LocalShard:
    """The scores of some rows on one shard, after their Shifts. Rows whose Shifts raise an exception are NaN.

    raw_RN: float32 [R, N], the logits. first: the id of the first one. shifts_R: of each row, None if it has none.
    maxima_RP: float32 [R, P], the maximum of each part of a group.
    """

    def __init__(self, raw_RN: torch.Tensor, first: int, shifts_R: Sequence[RowShifts | None]) -> None:
        self.raw_RN, self.first, self.x_RN = raw_RN, first, raw_RN
        self._shifted: dict[int, Shifted] = {}
        if raw_RN.shape[1] and any(shifts is not None for shifts in shifts_R):
            self.x_RN = raw_RN.clone()
            for row, shifts in enumerate(shifts_R):
                if shifts is not None:
                    self._shift(row, shifts)
        self._parts = parts(self.x_RN, first)
        self.maxima_RP = torch.cat([part.amax(-1) for part in self._parts], 1) if self._parts else self.x_RN[:, :0]

    def _shift(self, row: int, shifts: RowShifts) -> None:
        x_N, end = self.x_RN[row], self.first + self.x_RN.shape[1]
        try:
            ids_K, banned_N = shifts.touched(self.first, end), shifts.banned(self.first, end)
            at_K = torch.from_numpy(ids_K - self.first).to(x_N.device)
            shifted_K = shifts.apply(x_N[at_K].cpu().numpy(), ids_K)
        except Exception:  # noqa: BLE001  # a user-defined stage may raise anything; the whole row reports it
            x_N.fill_(torch.nan)
            return
        if banned_N is not None:
            if not x_N.max() < torch.inf:  # invalid, also if the token is banned
                x_N.fill_(torch.nan)
                return
            x_N.masked_fill_(torch.from_numpy(banned_N).to(x_N.device), -torch.inf)
        with np.errstate(over="ignore"):
            x_N[at_K] = torch.from_numpy(shifted_K.astype(np.float32)).to(x_N.device)
        self._shifted[row] = ids_K - self.first, shifted_K

    def masses(self, rows: Sequence[int], t_M: NDArray[np.float64]) -> torch.Tensor:
        """The sum of exp((x - top) / t) of each part of a group of some rows, float64 [M, P]; top: of the shard."""
        top_M = self.maxima_RP[list(rows)].amax(1) if self._parts and rows else torch.zeros(0)
        valid = [at for at, top in enumerate(top_M.tolist()) if -np.inf < top < np.inf]
        mass_MP = torch.zeros((len(rows), self.maxima_RP.shape[1]), dtype=torch.float64, device=self.x_RN.device)
        if valid:
            of_valid = [rows[at] for at in valid]
            every = len(of_valid) == len(self.x_RN)
            x_MN = self.x_RN if every else self.x_RN[of_valid]
            mass_MP[valid] = masses(x_MN, self.first, top_M[valid], t_M[valid])
            for at, row in zip(valid, of_valid, strict=True):
                if row in self._shifted:
                    self._correct(mass_MP[at], *self._shifted[row], float(top_M[at]), float(t_M[at]))
        return mass_MP

    def _correct(self, mass_P: torch.Tensor, column_K: Any, x_K: NDArray[np.float64], top: float, t: float) -> None:
        """Replace the weights of scores that were rounded to float32."""
        with np.errstate(all="ignore"):
            rounded_K = x_K.astype(np.float32).astype(np.float64)
            more_K = np.where(x_K == rounded_K, 0.0, np.exp((x_K - top) / t) - np.exp((rounded_K - top) / t))
        group_K = (column_K + self.first) // GROUP_SIZE - self.first // GROUP_SIZE
        more_P = np.bincount(group_K, more_K, minlength=len(mass_P))
        mass_P += torch.from_numpy(more_P).to(mass_P.device)

    def above(self, threshold_R: NDArray[np.float32], k_R: NDArray[np.int64]) -> tuple[NDArray[np.int64], Any, Any]:
        """The finite tokens at or above a threshold per row: their number per row, columns and raw scores, row by row.

        k_R: raise the threshold to one that at least k tokens of the shard reach; 0: do not.
        """
        low_R = np.maximum(threshold_R, LOWEST)
        for row in np.flatnonzero(k_R):
            low_R[row] = max(low_R[row], self._reached_by(int(k_R[row]), self.x_RN[row]))
        low_R1 = torch.from_numpy(low_R).to(self.x_RN.device)[:, None]
        columns, begin, group = self.x_RN.shape[1], 0, 0
        places: list[torch.Tensor] = []
        for part in self._parts:
            _, count, width = part.shape
            row_H, group_H = (self.maxima_RP[:, group : group + count] >= low_R1).nonzero().T
            hit_J, at_J = (part[row_H, group_H] >= low_R1[row_H]).nonzero().T
            places.append(row_H[hit_J] * columns + begin + group_H[hit_J] * width + at_J)
            begin, group = begin + count * width, group + count
        if not places:
            return np.zeros(len(low_R), np.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        at_K = places[0] if len(places) == 1 else torch.cat(places).sort().values
        row_K, column_K = at_K // columns, at_K % columns
        counts_R = torch.bincount(row_K, minlength=len(low_R)).cpu().numpy()
        return counts_R, column_K, self.raw_RN[row_K, column_K]

    @staticmethod
    def _reached_by(k: int, x_N: torch.Tensor) -> float:
        """A score that at least k tokens reach, and not many more: the k-th highest maximum of small blocks."""
        width = 32
        while width > 1 and len(x_N) // width < 2 * k:
            width //= 2
        maxima_B = x_N[: len(x_N) // width * width].view(-1, width).amax(-1)
        return float(maxima_B.topk(k).values[-1]) if k <= len(maxima_B) else LOWEST

    def contenders(
        self, rows: Sequence[int], groups: Sequence[int], t_M: NDArray[np.float64], keys: Sequence[Key]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """The tokens of a group that may win the draw inside it, for some rows: columns and raw scores."""
        found = []
        for row, group, t, key in zip(rows, groups, t_M.tolist(), keys, strict=True):
            begin = max(group * GROUP_SIZE - self.first, 0)
            end = min((group + 1) * GROUP_SIZE - self.first, self.x_RN.shape[1])
            x_N: Any = self.x_RN[row, begin:end].cpu().numpy().astype(np.float64)
            if row in self._shifted:
                column_K, x_K = self._shifted[row]
                inside_K = (column_K >= begin) & (column_K < end)
                x_N[column_K[inside_K] - begin] = x_K[inside_K]
            winner = -1
            if len(x_N) and x_N.max() > -np.inf:
                ids_N = np.arange(begin, end) + self.first
                winner = race(ids_N, np.exp((x_N - x_N.max()) / t), key, noise.TOKEN)
            column_N = np.flatnonzero(x_N > -np.inf) + begin if winner < 0 else np.array([winner - self.first])
            raw_N = self.raw_RN[row, torch.from_numpy(column_N).to(self.raw_RN.device)].cpu().numpy()
            found.append((column_N, raw_N))
        return found

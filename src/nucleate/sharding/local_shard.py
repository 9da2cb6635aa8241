"""The columns of the logits that one rank has: their scores after the Shifts, sums over groups of them, and candidates.

Rows stay on the device of the logits. Sums and draws over groups of 256 tokens run in compiled kernels once these are
loaded, else in torch or NumPy. Shifts are the rules of the stages in float64, with the scores of the reference backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import COMPOSED
from nucleate.sampling import noise
from nucleate.sampling.history import HistoryView, Ids
from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.reference import checked_values
from nucleate.sampling.rules import bans_tokens
from nucleate.sampling.stage import Shift, TokenInfo

TOO_CLOSE = 1e-8
"""Relative difference at which the times of two entries of a race are too close, as in the composed CPU path."""

Floats = NDArray[np.float64]
Key = tuple[int, int]
"""The seed and the step of the noise of a draw."""


def parts(x_RN: torch.Tensor, first: int) -> list[torch.Tensor]:
    """The columns from id ``first`` on, by groups, as views [R, P, W]: the end of a group, whole ones, a beginning."""
    count = x_RN.shape[1]
    head = min(-first % GROUP_SIZE, count)
    end = head + (count - head) // GROUP_SIZE * GROUP_SIZE
    found = [x_RN[:, None, :head]] if head else []
    if end > head:
        found.append(x_RN[:, head:end].unflatten(1, (-1, GROUP_SIZE)))
    return [*found, x_RN[:, None, end:]] if end < count else found


def masses(x_MN: torch.Tensor, first: int, top_M: torch.Tensor, t_M: Floats) -> torch.Tensor:
    """The sum of exp((x - top) / t) of each part of a group, float64 [M, P]. x_MN: float32; top_M: its maxima."""
    if x_MN.is_cpu and COMPOSED.ready:
        rows = zip(x_MN.numpy(), top_M.tolist(), t_M.tolist(), strict=True)
        return torch.from_numpy(np.stack([_row_masses(x_N, first, top, t) for x_N, top, t in rows]))
    top_M11, t_M11 = top_M.double()[:, None, None], torch.from_numpy(t_M).to(x_MN.device)[:, None, None]
    return torch.cat([part.double().sub_(top_M11).div_(t_M11).exp_().sum(-1) for part in parts(x_MN, first)], 1)


def _row_masses(x_N: NDArray[np.float32], first: int, top: float, t: float) -> Floats:
    head = min(-first % GROUP_SIZE, len(x_N))
    mass_P = np.empty((head > 0) - (head - len(x_N)) // GROUP_SIZE)
    tail, sums = np.empty(GROUP_SIZE, np.float32), np.empty(3)
    for part_N, part_P in ((x_N[:head], mass_P[: head > 0]), (x_N[head:], mass_P[head > 0 :])):
        if len(part_N):
            rest_N = part_N[len(part_N) // GROUP_SIZE * GROUP_SIZE :]
            tail[: len(rest_N)], tail[len(rest_N) :] = rest_N, -np.inf
            COMPOSED.group_masses(part_N, tail, top, 1.0 / t, 0.0, 0.0, part_P, sums)
    return mass_P


def race(ids_N: Ids, weight_N: Floats, key: Key, stream: int) -> int:
    """The id with the highest log(weight) + Gumbel noise; -1 if two are too close, or if all weights are 0."""
    if COMPOSED.ready:
        return int(COMPOSED.gumbel_race(ids_N, weight_N, np.uint64(key[0]), np.uint64(key[1]), stream))
    with np.errstate(divide="ignore"):
        time_N = -np.log1p(-noise.uniform(*key, stream, ids_N)) / weight_N
    best = int(time_N.argmin())
    is_close: Any = np.count_nonzero(time_N * (1.0 - TOO_CLOSE) <= time_N[best]) > 1
    return -1 if is_close or not np.isfinite(time_N[best]) else int(ids_N[best])


class _Inputs(NamedTuple):
    """What a Shift reads in this step."""

    shift: Shift
    ids: Ids | None  #: those that it may change; None: nearly all
    seen: tuple[Ids, Ids, Ids]  #: the tokens that occurred, ascending, with their counts in prompt and output
    listed: tuple[Ids, Floats]  #: the listed tokens, ascending, with their values
    value_V: Any  #: of ``touches = "all"``


class RowShifts:
    """The Shifts of one row in one step.

    past: the history; mask_W: the bitmask of the step, applied where a Mask is; size: V. Raises what the stages raise,
    and ValueError for listed tokens outside the vocabulary.
    """

    def __init__(
        self, shifts: tuple[Shift, ...], past: HistoryView, mask_W: NDArray[np.int32] | None, size: int
    ) -> None:
        self._mask_W, self._inputs = mask_W, [_inputs(shift, past, size) for shift in shifts]
        dense = [one for one in self._inputs if one.ids is None]
        self._bans = [one for one in dense if one.shift.touches != "all" and bans_tokens(one.shift)]
        self._touches_all = len(self._bans) < len(dense)

    def touched(self, first: int, end: int) -> Ids:
        """The ids from first to end whose scores ``apply`` has to compute; ``banned`` has the others that change."""
        if self._touches_all:
            return np.arange(first, end)
        found = [one.ids for one in self._inputs if one.ids is not None]
        ids_N = np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)
        return ids_N[(ids_N >= first) & (ids_N < end)]

    def banned(self, first: int, end: int) -> NDArray[np.bool_] | None:
        """Which of the ids from first to end are banned by a bitmask or a list of allowed tokens; None: none."""
        if not self._bans:
            return None
        token, banned_N = TokenInfo(np.arange(first, end), 0, 0, 0), np.zeros(end - first, bool)
        for one in self._bans:
            banned_N |= self._touches(one, token)
        return banned_N

    def apply(self, x_N: NDArray[Any], ids_N: Ids) -> Floats:
        """The scores of some tokens after the Shifts. ids_N: ascending. Raises ValueError for a NaN or +inf."""
        x_N = np.asarray(x_N, np.float64)
        with np.errstate(all="ignore"):
            for one in self._inputs:
                shift, (seen, prompt, output) = one.shift, one.seen
                value_N = one.value_V[ids_N] if np.ndim(one.value_V) else one.value_V
                prompt_N, output_N = _spread(seen, prompt, ids_N), _spread(seen, output, ids_N)
                token = TokenInfo(ids_N, prompt_N, output_N, _spread(*one.listed, ids_N), value_N)
                shifted_N = shift.apply(x_N, token)
                if shift.touches == "all":
                    shifted_N = np.asarray(shifted_N, np.float32).astype(np.float64)
                x_N = np.where(self._touches(one, token) & (x_N > -np.inf), shifted_N, x_N)
                if not (x_N < np.inf).all():
                    raise ValueError(f"NaN or +inf after {shift.name}")
        return x_N

    def _touches(self, one: _Inputs, token: TokenInfo) -> NDArray[np.bool_]:
        """Which of some tokens a Shift touches."""
        touches, result = one.shift.touches, np.ones(len(token.id), bool)
        if touches in ("seen", "output"):
            result = token.output_count + (token.prompt_count if touches == "seen" else 0.0) > 0
        elif touches in ("listed", "unlisted"):
            result = np.isin(token.id, one.listed[0]) == (touches == "listed")
        elif touches == "masked":
            words_N = -1 if self._mask_W is None else self._mask_W[token.id >> 5]
            result = (words_N >> (token.id & 31)) & 1 == 0
        return result


def _inputs(shift: Shift, past: HistoryView, size: int) -> _Inputs:
    ids_K, prompt_K, output_K = past.counts(shift.window)
    order_K = np.argsort(ids_K)
    listing = past.listing(shift)
    listed_N, value_N = np.fromiter(listing, np.int64, len(listing)), np.fromiter(listing.values(), float, len(listing))
    order_N = np.argsort(listed_N)
    if len(listed_N) and not 0 <= listed_N[order_N[0]] <= listed_N[order_N[-1]] < size:
        raise ValueError("a listed token is outside the vocabulary")
    value_V = checked_values(shift, past.values(shift, size), size) if shift.touches == "all" else 0.0
    seen, listed = (ids_K[order_K], prompt_K[order_K], output_K[order_K]), (listed_N[order_N], value_N[order_N])
    ids = {"seen": seen[0], "output": seen[0], "listed": listed[0]}.get(shift.touches)
    return _Inputs(shift, ids, seen, listed, value_V)


def _spread(ids_K: Ids, value_K: NDArray[Any], ids_N: Ids) -> Floats:
    """The values of ids_K at the places of the same ids in ids_N, 0 elsewhere. Both are ascending."""
    result_N = np.zeros(len(ids_N))
    if len(ids_K) and len(ids_N):
        at_K = np.minimum(np.searchsorted(ids_N, ids_K), len(ids_N) - 1)
        found_K = ids_N[at_K] == ids_K
        result_N[at_K[found_K]] = value_K[found_K]
    return result_N


LOWEST = float(np.finfo(np.float32).min)


class LocalShard:
    """The scores of some rows on one shard, after their Shifts. Rows whose Shifts raise an exception are NaN.

    raw_RN: float32 [R, N], the logits. first: the id of the first one. shifts_R: of each row, None if it has none.
    maxima_RP: float32 [R, P], the maximum of each part of a group.
    """

    def __init__(self, raw_RN: torch.Tensor, first: int, shifts_R: Sequence[RowShifts | None]) -> None:
        self.raw_RN, self.first, self.x_RN = raw_RN, first, raw_RN
        self._shifted: dict[int, tuple[Ids, Floats]] = {}  # columns, and their scores, which float32 may round
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

    def masses(self, rows: Sequence[int], t_M: Floats) -> torch.Tensor:
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

    def _correct(self, mass_P: torch.Tensor, column_K: Any, x_K: Floats, top: float, t: float) -> None:
        """Replace the weights of scores that were rounded to float32."""
        with np.errstate(all="ignore"):
            rounded_K = x_K.astype(np.float32).astype(np.float64)
            more_K = np.where(x_K == rounded_K, 0.0, np.exp((x_K - top) / t) - np.exp((rounded_K - top) / t))
        group_K = (column_K + self.first) // GROUP_SIZE - self.first // GROUP_SIZE
        more_P = np.bincount(group_K, more_K, minlength=len(mass_P))
        mass_P += torch.from_numpy(more_P).to(mass_P.device)

    def above(self, threshold_R: NDArray[np.float32], k_R: Ids) -> tuple[Ids, Any, Any]:
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

    def contenders(self, row: int, group: int, t: float, key: Key) -> tuple[Ids, NDArray[np.float32]]:
        """The tokens of a group that may win the draw inside it: columns and raw scores."""
        begin = max(group * GROUP_SIZE - self.first, 0)
        end = min((group + 1) * GROUP_SIZE - self.first, self.x_RN.shape[1])
        x_N: Any = self.x_RN[row, begin:end].cpu().numpy().astype(np.float64)
        if row in self._shifted:
            column_K, x_K = self._shifted[row]
            inside_K = (column_K >= begin) & (column_K < end)
            x_N[column_K[inside_K] - begin] = x_K[inside_K]
        winner = -1
        if len(x_N) and x_N.max() > -np.inf:
            winner = race(np.arange(begin, end) + self.first, np.exp((x_N - x_N.max()) / t), key, noise.TOKEN)
        column_N = np.flatnonzero(x_N > -np.inf) + begin if winner < 0 else np.array([winner - self.first])
        return column_N, self.raw_RN[row, torch.from_numpy(column_N).to(self.raw_RN.device)].cpu().numpy()

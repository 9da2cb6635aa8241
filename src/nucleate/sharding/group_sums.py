"""Sums and draws over groups of 256 tokens: with compiled kernels once they are loaded, else with torch or NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import GENERIC
from nucleate.sampling import noise
from nucleate.sampling.noise import GROUP_SIZE

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
    if x_MN.is_cpu and GENERIC.ready:
        rows = zip(x_MN.numpy(), top_M.tolist(), t_M.tolist(), strict=True)
        return torch.from_numpy(np.stack([_row_masses(x_N, first, top, t) for x_N, top, t in rows]))
    top_M11, t_M11 = top_M.double()[:, None, None], torch.from_numpy(t_M).to(x_MN.device)[:, None, None]
    found = [part.double().sub_(top_M11).div_(t_M11).exp_().sum(-1) for part in parts(x_MN, first)]
    return torch.cat(found, 1)


def _row_masses(x_N: NDArray[np.float32], first: int, top: float, t: float) -> Floats:
    head = min(-first % GROUP_SIZE, len(x_N))
    mass_P = np.empty((head > 0) - (head - len(x_N)) // GROUP_SIZE)
    tail, sums = np.empty(GROUP_SIZE, np.float32), np.empty(3)
    for part_N, part_P in ((x_N[:head], mass_P[: head > 0]), (x_N[head:], mass_P[head > 0 :])):
        if len(part_N):
            rest_N = part_N[len(part_N) // GROUP_SIZE * GROUP_SIZE :]
            tail[: len(rest_N)], tail[len(rest_N) :] = rest_N, -np.inf
            GENERIC.group_masses(part_N, tail, top, 1.0 / t, part_P, sums)
    return mass_P


def race(ids_N: NDArray[np.int64], weight_N: Floats, key: Key, stream: int) -> int:
    """The id with the highest log(weight) + Gumbel noise; -1 if two are too close, or if all weights are 0."""
    if GENERIC.ready:
        return int(GENERIC.gumbel_race(ids_N, weight_N, np.uint64(key[0]), np.uint64(key[1]), stream))
    with np.errstate(divide="ignore"):
        time_N = -np.log1p(-noise.uniform(*key, stream, ids_N)) / weight_N
    best = int(time_N.argmin())
    is_close: Any = np.count_nonzero(time_N * (1.0 - TOO_CLOSE) <= time_N[best]) > 1
    return -1 if is_close or not np.isfinite(time_N[best]) else int(ids_N[best])

"""The chain as plain tensor code: any device, no kernels of its own, no graph break under ``torch.compile``.

It sorts each row, so that it is as simple as the reference, and as slow as sorting: for devices without Triton. Numbers
of rows are columns in the order of ``plan.Numbers``; where they are float64 all that follows from them is, and the
tokens are the reference's; a device that has no float64 is given float32. Carries no meaning of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nucleate.backends.cuda.edits import Edits, edited, forbidden
from nucleate.backends.cuda.noise import GROUP, GROUP_SIZE, TOKEN, times
from nucleate.core.maths import SLACK

NOT_DRAWN = -1
"""The token of a row from which none can be drawn."""

AT_ONCE = 1 << 24
"""So many scores are looked at together: what is made of them takes some 65 bytes each."""


class Numbers(NamedTuple):
    """The parameters of rows, [R, 1] each; neutral ones do nothing."""

    t: torch.Tensor  #: temperature; 0 takes the first token
    sigmas: torch.Tensor  #: top-n-sigma; 0 keeps all
    k: torch.Tensor  #: top-k; 0 keeps all
    m: torch.Tensor  #: min-p; 0 keeps all
    p: torch.Tensor  #: top-p; 1 keeps all
    late_m: torch.Tensor  #: min-p after top-p
    late_t: torch.Tensor  #: temperature after the cuts; 1 does nothing


def sample(
    logits_RV: torch.Tensor,
    numbers_RC: torch.Tensor,
    seeds_R: torch.Tensor,
    steps_R: torch.Tensor,
    edits: Edits | None = None,
    mask_RW: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token per row: int64 [R]; NOT_DRAWN where a row holds NaN, +inf or no finite score.

    logits_RV: any float. numbers_RC: see ``plan.Numbers``. seeds_R, steps_R: int64, the bits of integers in
    0..2**64 - 1. mask_RW: int32 [R, V / 32 or more], what is allowed, lowest bit first.
    """
    most = max(1, AT_ONCE // logits_RV.shape[1])
    if len(logits_RV) > most:
        parts = []
        for start in range(0, len(logits_RV), most):
            part = slice(start, start + most)
            own = None if edits is None else Edits(*(column_RK[part] for column_RK in edits))
            allowed = None if mask_RW is None else mask_RW[part]
            parts.append(sample(logits_RV[part], numbers_RC[part], seeds_R[part], steps_R[part], own, allowed))
        return torch.cat(parts)
    x_RV, odd_R = scores(logits_RV, edits, mask_RW)
    numbers, greedy_R1 = read(numbers_RC)
    inside_RV = survivors(x_RV, numbers, greedy_R1)
    token_R = draw(x_RV, inside_RV, numbers, seeds_R[:, None], steps_R[:, None])
    return torch.where(odd_R, NOT_DRAWN, token_R)


def scores(
    logits_RV: torch.Tensor, edits: Edits | None = None, mask_RW: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores as float32, edited and masked, and which rows are odd: nothing is drawn from these, and all is 0."""
    x_RV = logits_RV.to(torch.float32)
    odd_R = (~(x_RV < torch.inf)).any(1)
    if edits is not None:
        x_RV = edited(x_RV, edits)
        odd_R = odd_R | (~(x_RV < torch.inf)).any(1)
    if mask_RW is not None:
        x_RV = torch.where(forbidden(mask_RW, x_RV.shape[1]), -torch.inf, x_RV)
    odd_R = odd_R | ~(x_RV > -torch.inf).any(1)
    return torch.where(odd_R[:, None] | (x_RV == 0), 0.0, x_RV), odd_R  # of -0.0 it makes 0.0: they are equal


def read(numbers_RC: torch.Tensor) -> tuple[Numbers, torch.Tensor]:
    """The columns, and which rows take the first token; these get a temperature that can be divided by."""
    numbers = Numbers(*numbers_RC[:, :, None].unbind(1))
    greedy_R1 = (numbers.t == 0) | (numbers.k == 1)
    return numbers._replace(t=torch.where(greedy_R1, 1.0, numbers.t)), greedy_R1


def survivors(x_RV: torch.Tensor, numbers: Numbers, greedy_R1: torch.Tensor) -> torch.Tensor:
    """Which tokens the cuts leave: bool [R, V]."""
    sorted_RV, order_RV = torch.sort(x_RV, dim=1, descending=True, stable=True)
    kept_R1 = torch.where(greedy_R1, 1, lengths(sorted_RV, numbers))
    cut_R1, last_R1 = sorted_RV.gather(1, kept_R1 - 1), order_RV.gather(1, kept_R1 - 1)
    ids_V = torch.arange(x_RV.shape[1], device=x_RV.device)
    return (x_RV > cut_R1) | ((x_RV == cut_R1) & (ids_V <= last_R1))


def lengths(sorted_RV: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    """How many of the first tokens stay: int64 [R, 1]. Every cut keeps a prefix of the order."""
    in_RV = sorted_RV > -torch.inf
    below_RV = (sorted_RV.to(numbers.t.dtype) - sorted_RV[:, :1]) / numbers.t
    ids_V = torch.arange(sorted_RV.shape[1], device=sorted_RV.device)
    floor_R1 = torch.maximum(floor(numbers.m), sigma_floor(below_RV, in_RV, numbers.sigmas))
    n_R1 = count(in_RV & (below_RV >= floor_R1))
    n_R1 = torch.where(numbers.k > 0, torch.minimum(n_R1, numbers.k.to(torch.int64)), n_R1)
    weight_RV = torch.where(ids_V < n_R1, torch.exp(below_RV), 0.0)
    until_RV = weight_RV.cumsum(1)
    before_RV = torch.cat((torch.zeros_like(until_RV[:, :1]), until_RV[:, :-1]), 1)
    goal_R1 = numbers.p * weight_RV.sum(1, keepdim=True) * (1.0 - SLACK)
    reached_R1 = count((ids_V < n_R1) & (before_RV < goal_R1))
    n_R1 = torch.where(numbers.p < 1, reached_R1, n_R1)
    return torch.minimum(n_R1, count(in_RV & (below_RV >= floor(numbers.late_m))))


def floor(m_R1: torch.Tensor) -> torch.Tensor:
    """What min-p keeps begins here, from the top; of 0 at -inf."""
    return torch.log(m_R1) - SLACK


def sigma_floor(below_RV: torch.Tensor, in_RV: torch.Tensor, sigmas_R1: torch.Tensor) -> torch.Tensor:
    """The same for top-n-sigma."""
    n_R1 = in_RV.sum(1, keepdim=True)
    mean_R1 = torch.where(in_RV, below_RV, 0.0).sum(1, keepdim=True) / n_R1
    square_R1 = torch.where(in_RV, below_RV - mean_R1, 0.0).square().sum(1, keepdim=True)
    return torch.where(sigmas_R1 > 0, -sigmas_R1 * torch.sqrt(square_R1 / n_R1) - SLACK, -torch.inf)


def count(kept_RV: torch.Tensor) -> torch.Tensor:
    """How many stay; the best token always does."""
    return kept_RV.sum(1, keepdim=True).clamp(min=1)


def draw(
    x_RV: torch.Tensor, inside_RV: torch.Tensor, numbers: Numbers, seeds_R1: torch.Tensor, steps_R1: torch.Tensor
) -> torch.Tensor:
    """The draw in two levels among the tokens that are left: int64 [R]."""
    dtype, (rows, size) = numbers.t.dtype, x_RV.shape
    below_RV = (x_RV.to(dtype) - x_RV.amax(1, keepdim=True)) / numbers.t / numbers.late_t
    weight_RV = torch.where(inside_RV, torch.exp(below_RV), 0.0)
    padded_RV = torch.nn.functional.pad(weight_RV, (0, -size % GROUP_SIZE))
    weight_RGT = padded_RV.view(rows, -1, GROUP_SIZE)
    groups_G = torch.arange(weight_RGT.shape[1], device=x_RV.device)
    group_R1 = race(weight_RGT.sum(2), seeds_R1, steps_R1, GROUP, groups_G)
    ids_RT = group_R1 * GROUP_SIZE + torch.arange(GROUP_SIZE, device=x_RV.device)
    place_R1 = race(padded_RV.gather(1, ids_RT), seeds_R1, steps_R1, TOKEN, ids_RT)
    return (group_R1 * GROUP_SIZE + place_R1)[:, 0]


def race(
    weight_RN: torch.Tensor, seeds_R1: torch.Tensor, steps_R1: torch.Tensor, stream: int, ids_RN: torch.Tensor
) -> torch.Tensor:
    """The place of the winner: int64 [R, 1]."""
    time_RN = times(seeds_R1, steps_R1, stream, ids_RN, weight_RN.dtype) / weight_RN  # of what is out, +inf
    return time_RN.argmin(1, keepdim=True)

"""Logprobs and ranks of a few tokens of each row, computed on the device. Equal to ``token_logprobs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nucleate.outputs import StepLogprobs, TokenLogprob

Wanted = tuple[int, tuple[int, ...]]
"""See ``Tap.wanted``."""


class TensorLogprobs(NamedTuple):
    """Of each row the token drawn, those asked for, the best ones, [R, N] each; nothing here waits for the device."""

    ids_RN: torch.Tensor  #: int64; below 0 where there is none
    logprobs_RN: torch.Tensor
    ranks_RN: torch.Tensor  #: int64


def report(
    x_RV: torch.Tensor, tokens_R: torch.Tensor, requested_RA: torch.Tensor, top: int, floats: torch.dtype
) -> TensorLogprobs:
    """x_RV: float32 or float64; what is out is at -inf. tokens_R: those drawn, below 0 for none.

    asked_RA: int64, below 0 for none; top: of how many of the best.
    """
    x_RV = torch.where(x_RV == 0, 0.0, x_RV)  # of -0.0 it makes 0.0: they are equal
    some_RN = torch.cat((tokens_R[:, None], requested_RA), 1)
    given_RN = x_RV.gather(1, some_RN.clamp(min=0))
    place_V = torch.arange(x_RV.shape[1], device=x_RV.device)
    ranks = [
        ((x_RV > x_R1) | ((x_RV == x_R1) & (place_V < id_R1))).sum(1, keepdim=True) + 1
        for x_R1, id_R1 in zip(given_RN.split(1, 1), some_RN.split(1, 1), strict=True)
    ]
    count = min(top, x_RV.shape[1])
    best_RN = x_RV.argsort(dim=1, descending=True, stable=True)[:, :count] if count else some_RN[:, :0]
    best_x_RN = x_RV.gather(1, best_RN)
    ids_RN, x_RN = torch.cat((some_RN, best_RN), 1), torch.cat((given_RN, best_x_RN), 1).to(floats)
    nth_RN = torch.arange(1, count + 1, device=x_RV.device).expand(len(x_RV), -1)
    below_RV = x_RV.to(floats) - x_RV.amax(1, keepdim=True).to(floats)
    logprobs_RN = x_RN - x_RV.amax(1, keepdim=True).to(floats) - below_RV.exp().sum(1, keepdim=True).log()
    return TensorLogprobs(ids_RN, logprobs_RN, torch.cat((*ranks, nth_RN), 1))


def to_step_logprobs(made: TensorLogprobs, wanted: Sequence[Wanted]) -> list[StepLogprobs | None]:
    """As values; None for a row without a token. Waits for the device."""
    ids_RN, logprobs_RN, ranks_RN = (column.tolist() for column in made)
    most = max((len(requested) for _, requested in wanted), default=0)
    found: list[StepLogprobs | None] = []
    for (top, requested), ids, logprobs, ranks in zip(wanted, ids_RN, logprobs_RN, ranks_RN, strict=True):
        inside = [logprob > -float("inf") for logprob in logprobs]
        each = [
            TokenLogprob(token, logprob if there else -float("inf"), rank if there else None)
            for token, logprob, rank, there in zip(ids, logprobs, ranks, inside, strict=True)
        ]
        best = [one for one in each[1 + most : 1 + most + top] if one.rank is not None]
        whole = StepLogprobs(each[0], tuple(best), tuple(each[1 : 1 + len(requested)]))
        found.append(whole if ids[0] >= 0 else None)
    return found

"""Logprobs and ranks of a few tokens of each row, computed on the device. Equal to ``token_logprobs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nucleate.outputs import StepLogprobs, TokenLogprob

LogprobsRequest = tuple[int, tuple[int, ...]]
"""(number of most likely tokens, token ids), see ``Tap.request``."""


class TensorLogprobs(NamedTuple):
    """Logprobs per row on the device, [R, N]: the sampled token, the requested ids, the most likely tokens."""

    ids_RN: torch.Tensor  #: int64; -1 for padding and for rows without a token
    logprobs_RN: torch.Tensor
    ranks_RN: torch.Tensor  #: int64


def compute_logprobs(
    x_RV: torch.Tensor, tokens_R: torch.Tensor, requested_RA: torch.Tensor, top: int, floats: torch.dtype
) -> TensorLogprobs:
    """Logprobs and ranks of a few tokens per row, without synchronising.

    x_RV: scores, float32 or float64, -inf for masked tokens. tokens_R: the sampled tokens, -1 for none. requested_RA:
    int64, further token ids, padded with -1. top: the number of most likely tokens. floats: dtype of the logprobs.
    """
    x_RV = torch.where(x_RV == 0, 0.0, x_RV)  # -0.0 becomes 0.0
    given_ids_RN = torch.cat((tokens_R[:, None], requested_RA), 1)
    given_x_RN = x_RV.gather(1, given_ids_RN.clamp(min=0))
    id_V = torch.arange(x_RV.shape[1], device=x_RV.device)
    ranks = [
        ((x_RV > x_R1) | ((x_RV == x_R1) & (id_V < id_R1))).sum(1, keepdim=True) + 1
        for x_R1, id_R1 in zip(given_x_RN.split(1, 1), given_ids_RN.split(1, 1), strict=True)
    ]
    num_top = min(top, x_RV.shape[1])
    best_RN = x_RV.argsort(dim=1, descending=True, stable=True)[:, :num_top] if num_top else given_ids_RN[:, :0]
    best_x_RN = x_RV.gather(1, best_RN)
    ids_RN, x_RN = torch.cat((given_ids_RN, best_RN), 1), torch.cat((given_x_RN, best_x_RN), 1).to(floats)
    nth_RN = torch.arange(1, num_top + 1, device=x_RV.device).expand(len(x_RV), -1)
    below_RV = x_RV.to(floats) - x_RV.amax(1, keepdim=True).to(floats)
    logprobs_RN = x_RN - x_RV.amax(1, keepdim=True).to(floats) - below_RV.exp().sum(1, keepdim=True).log()
    return TensorLogprobs(ids_RN, logprobs_RN, torch.cat((*ranks, nth_RN), 1))


def to_step_logprobs(report: TensorLogprobs, requests: Sequence[LogprobsRequest]) -> list[StepLogprobs | None]:
    """Copy logprobs to the host: one StepLogprobs per row, None for a row without a token. Synchronises."""
    ids_RN, logprobs_RN, ranks_RN = (column.tolist() for column in report)
    max_requested = max((len(requested) for _, requested in requests), default=0)
    steps: list[StepLogprobs | None] = []
    for (top, requested), ids, logprobs, ranks in zip(requests, ids_RN, logprobs_RN, ranks_RN, strict=True):
        is_finite = [logprob > -float("inf") for logprob in logprobs]
        entries = [
            TokenLogprob(token, logprob if finite else -float("inf"), rank if finite else None)
            for token, logprob, rank, finite in zip(ids, logprobs, ranks, is_finite, strict=True)
        ]
        best = [one for one in entries[1 + max_requested : 1 + max_requested + top] if one.rank is not None]
        step = StepLogprobs(entries[0], tuple(best), tuple(entries[1 : 1 + len(requested)]))
        steps.append(step if ids[0] >= 0 else None)
    return steps

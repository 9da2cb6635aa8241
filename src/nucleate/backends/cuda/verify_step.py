"""Logits to verified tokens: the plain chain at all places of the drafts of all rows, and a rule. Knows no model.

One call is a step of many rows with drafts, without a wait for the device. Edits and masks are of places: penalties of
each count the tokens drafted before it, and a grammar has read them.
"""

from __future__ import annotations

import torch

from nucleate.backends.cuda import plain, verify
from nucleate.backends.cuda.edits import Edits
from nucleate.backends.cuda.verify import Verified


def coupled_step(
    logits_RNV: torch.Tensor,
    drafted_RK: torch.Tensor,
    numbers_RC: torch.Tensor,
    seeds_R: torch.Tensor,
    steps_R: torch.Tensor,
    stops_RS: torch.Tensor | None = None,
    edits_RN: Edits | None = None,
    mask_RNW: torch.Tensor | None = None,
) -> Verified:
    """Draw at all places, each with the noise of its own step, and keep what was drafted: the text without drafts.

    Raises ValueError for shapes that do not fit.

    logits_RNV: any float, of the last token of a row and of each drafted one. numbers_RC, seeds_R: see
    ``plain.sample``. steps_R: of the first place. edits_RN: its columns are [R, N, entries]. mask_RNW: int32, see
    ``plain.sample``. stops_RS: see ``verify.coupled``.
    """
    rows, places, _ = logits_RNV.shape
    steps_RN = steps_R[:, None] + torch.arange(places, device=steps_R.device)
    drawn_M = plain.sample(
        logits_RNV.flatten(0, 1),
        per_place(numbers_RC, places),
        per_place(seeds_R, places),
        steps_RN.flatten(),
        flat_edits(edits_RN),
        None if mask_RNW is None else mask_RNW.flatten(0, 1),
    )
    return verify.coupled(drafted_RK, drawn_M.view(rows, places), stops_RS)


def rejection_step(
    logits_RNV: torch.Tensor,
    drafted_RK: torch.Tensor,
    q_RKV: torch.Tensor | None,
    numbers_RC: torch.Tensor,
    seeds_R: torch.Tensor,
    steps_R: torch.Tensor,
    stops_RS: torch.Tensor | None = None,
    edits_RN: Edits | None = None,
    mask_RNW: torch.Tensor | None = None,
) -> Verified:
    """Verify by laws, see ``verify.rejection``; its coins are those of the round of ``steps_R``."""
    p_RNV = laws(logits_RNV, numbers_RC, edits_RN, mask_RNW)
    count = drafted_RK.shape[1]
    coins_RK = verify.coins(seeds_R, steps_R, count, numbers_RC.dtype)
    coin_R = verify.last_coin(seeds_R, steps_R, numbers_RC.dtype)
    return verify.rejection(p_RNV, drafted_RK, q_RKV, coins_RK, coin_R, stops_RS)


def laws(
    logits_RNV: torch.Tensor,
    numbers_RC: torch.Tensor,
    edits_RN: Edits | None = None,
    mask_RNW: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the tokens of all places would be drawn from: chances [R, N, V], of the type of the numbers.

    All of them are 0 where no token can be drawn. Arguments are as of ``coupled_step``.
    """
    mask_MW = None if mask_RNW is None else mask_RNW.flatten(0, 1)
    x_MV, odd_M = plain.scores(logits_RNV.flatten(0, 1), flat_edits(edits_RN), mask_MW)
    numbers, greedy_M1 = plain.read(per_place(numbers_RC, logits_RNV.shape[1]))
    inside_MV = plain.survivors(x_MV, numbers, greedy_M1) & ~odd_M[:, None]
    below_MV = (x_MV.to(numbers.t.dtype) - x_MV.amax(1, keepdim=True)) / numbers.t / numbers.late_t
    weight_MV = torch.where(inside_MV, torch.exp(below_MV), 0.0)
    whole_M1 = weight_MV.sum(1, keepdim=True)
    return (weight_MV / torch.where(odd_M[:, None], 1.0, whole_M1)).view(logits_RNV.shape)


def per_place(column_R: torch.Tensor, places: int) -> torch.Tensor:
    """A column of rows as one of their places."""
    return column_R[:, None].expand(-1, places, *column_R.shape[1:]).flatten(0, 1)


def flat_edits(edits_RN: Edits | None) -> Edits | None:
    """Edits of places as edits of rows."""
    return None if edits_RN is None else Edits(*(column.flatten(0, 1) for column in edits_RN))

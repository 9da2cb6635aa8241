"""Applies each shape of stage to the ranked tokens of many rows."""

from __future__ import annotations

from typing import Any

import torch

from nucleate.sampling.backends.torch.bound_stage import BoundStage
from nucleate.sampling.backends.torch.ranked_tokens import RankedTokens, sorted_of


def narrowed(kept: RankedTokens, mine: BoundStage, coins_R1: Any, spared_RK: Any) -> RankedTokens:
    """The tokens after a stage that is neither a Tap nor a Draw. coins_R1: those of the step."""
    kept, step = kept.repacked(), mine.step
    if step.greedy:
        return kept.cut(last=kept.fixed.start_R1)
    if step.shape == "Scale":
        return _scaled(kept.settled(), mine)
    if step.shape == "Floor":
        return _floored(kept, mine)
    return _prefix(kept, mine) if step.shape == "Prefix" else _beheaded(kept.settled(), mine, coins_R1, spared_RK)


def _scaled(kept: RankedTokens, mine: BoundStage) -> RankedTokens:
    rule = mine.rules["apply"]
    said_RN = mine.apply("apply", kept.below_RN, kept.row(rule.row))
    if rule.straight:
        return RankedTokens(kept.fixed, kept.ids_RN, said_RN, said_RN)
    x_RN = torch.where(kept.inside(), said_RN, kept.fixed.out)
    if not mine.step.kind.monotone:  # type: ignore[attr-defined]  # of equal scores the lowest id comes first
        return sorted_of(kept.fixed, kept.by_id(x_RN)[:, : x_RN.shape[1]])
    return RankedTokens(kept.fixed, kept.ids_RN, x_RN, x_RN - x_RN.amax(1, keepdim=True))


def _floored(kept: RankedTokens, mine: BoundStage) -> RankedTokens:
    rule = mine.rules["floor"]
    if rule.row - {"top"}:
        kept = kept.settled()
    floor_R1 = mine.constant("floor", lambda: _column(kept, mine.apply("floor", kept.row(rule.row))))
    return kept.cut(floor=floor_R1, low=rule.low)


def _prefix(kept: RankedTokens, mine: BoundStage) -> RankedTokens:
    weight, fixed = mine.rules["weight"], kept.fixed
    own, reaches, ties = "order" in mine.rules, mine.step.kind.reaches, mine.step.ties  # type: ignore[attr-defined]

    def goal() -> torch.Tensor:
        return _column(kept, mine.apply("target", kept.row(mine.rules["target"].row)))

    if weight.ones and not own:
        if mine.rules["target"].row - {"top"}:
            kept = kept.settled()
        last_R1 = mine.constant("target", lambda: (goal().ceil() if reaches else goal().floor()).clamp(min=1.0) - 1.0)
        return _with_ties(kept, fixed.place_N <= last_R1) if ties else kept.cut(last=last_R1)
    kept = kept.settled()
    if weight.sums and reaches and not own and not ties:  # the sums before each token never fall
        return kept.cut(last=torch.searchsorted(kept.weight().cumsum(1), goal()))
    below_RN, place_RN = kept.below_RN, None
    if own:
        key_RN = mine.apply("order", below_RN, kept.row(mine.rules["order"].row))
        place_RN = torch.where(kept.inside(), key_RN, torch.inf).argsort(dim=1, stable=True)
        below_RN = below_RN.gather(1, place_RN)
    if weight.sums:
        weight_RN = below_RN.exp() if own else kept.weight()
    else:
        weight_RN = torch.where(below_RN > -torch.inf, mine.apply("weight", below_RN, kept.row(weight.row)), 0.0)
    until_RN = weight_RN.cumsum(1)
    if reaches:
        keep_RN = torch.cat((fixed.true_R1, (until_RN < goal())[:, :-1]), 1)
    else:
        keep_RN = (until_RN <= goal()) | fixed.first_N
    if place_RN is not None:
        keep_RN = torch.zeros_like(keep_RN).scatter(1, place_RN, keep_RN)
    if ties:
        kept = _with_ties(kept, keep_RN)
        return kept.only(kept.inside(), packed=False) if own else kept
    return kept.only(keep_RN, packed=not own)


def _with_ties(kept: RankedTokens, keep_RN: torch.Tensor) -> RankedTokens:
    """The tokens of a mask, and those equal to the least of them."""
    kept = kept.settled()
    least_R1 = torch.where(keep_RN & kept.inside(), kept.x_RN, torch.inf).amin(1, keepdim=True)
    return kept.only(keep_RN | (kept.x_RN >= least_R1))


def _beheaded(kept: RankedTokens, mine: BoundStage, coins_R1: Any, spared_RK: Any) -> RankedTokens:
    cut_R1 = _column(kept, mine.apply("ceiling", kept.row(mine.rules["ceiling"].row)))
    above_RN = kept.below_RN >= cut_R1.clamp(min=torch.finfo(kept.fixed.floats).min)
    dropped_R1 = torch.where(coins_R1 < mine.me.chance, above_RN.sum(1, keepdim=True) - 1, 0)
    keep_RN = kept.fixed.place_N >= dropped_R1
    if spared_RK is not None and spared_RK.shape[1]:
        spared_RP = torch.zeros_like(kept.fixed.out_RP, dtype=torch.bool)
        spared_RP = torch.nn.functional.pad(spared_RP, (0, 1)).scatter(1, spared_RK, True)  # no token: behind the last
        keep_RN = keep_RN | spared_RP.gather(1, kept.ids_RN)
    return kept.only(keep_RN, packed=False)


def _column(kept: RankedTokens, value: Any) -> torch.Tensor:
    """What a rule returns as a column; without any numbers of rows it is Python's own."""
    column: torch.Tensor = value if isinstance(value, torch.Tensor) else kept.fixed.zero_1 + value
    return column.expand(len(kept.fixed.true_R1), 1) if column.dim() < 2 else column

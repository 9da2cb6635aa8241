"""Applies Scale, Floor, Prefix and Ceiling stages to the ranked tokens of many rows."""

from __future__ import annotations

from typing import Any

import torch

from nucleate.sampling.backends.torch.bound_stage import BoundStage
from nucleate.sampling.backends.torch.ranked_tokens import RankedTokens, RowConstants, rank_tokens


def apply_filter(tokens: RankedTokens, stage: BoundStage, uniform_R1: Any, exempt_RK: Any) -> RankedTokens:
    """The tokens after a stage. uniform_R1, exempt_RK: random number and exempt ids, for a Ceiling."""
    tokens, signature = tokens.resorted(), stage.signature
    if signature.greedy:
        return tokens.with_cut(last=tokens.constants.zero_R1)
    if signature.shape == "Scale":
        return _apply_scale(tokens.apply_cuts(), stage)
    if signature.shape == "Floor":
        return _apply_floor(tokens, stage)
    if signature.shape == "Prefix":
        return _apply_prefix(tokens, stage)
    return _apply_ceiling(tokens.apply_cuts(), stage, uniform_R1, exempt_RK)


def _apply_scale(tokens: RankedTokens, stage: BoundStage) -> RankedTokens:
    rule = stage.rules["apply"]
    y_RN = stage.apply("apply", tokens.below_RN, stage.stats(tokens, "apply"))
    if rule.is_linear:
        return RankedTokens(tokens.constants, tokens.ids_RN, y_RN, y_RN)
    x_RN = torch.where(tokens.surviving(), y_RN, tokens.constants.neg_inf)
    if not stage.signature.kind.monotone:  # type: ignore[attr-defined]  # equal scores are ranked by id
        return rank_tokens(tokens.constants, tokens.by_id(x_RN)[:, : x_RN.shape[1]])
    return RankedTokens(tokens.constants, tokens.ids_RN, x_RN, x_RN - x_RN.amax(1, keepdim=True))


def _apply_floor(tokens: RankedTokens, stage: BoundStage) -> RankedTokens:
    rule = stage.rules["floor"]
    if rule.row - {"top"}:
        tokens = tokens.apply_cuts()
    floor_R1 = stage.cached("floor", lambda: _column(tokens, stage.apply("floor", stage.stats(tokens, "floor"))))
    if stage.min_keep_R1 is not None:
        tokens = tokens.apply_cuts()
        return tokens.filtered((tokens.below_RN >= floor_R1) | (tokens.constants.position_N < stage.min_keep_R1))
    return tokens.with_cut(floor=floor_R1, floor_below_top=rule.below_top)


def _apply_prefix(tokens: RankedTokens, stage: BoundStage) -> RankedTokens:
    weight, constants = stage.rules["weight"], tokens.constants
    reorders, inclusive, ties = "order" in stage.rules, stage.signature.kind.inclusive, stage.signature.ties  # type: ignore[attr-defined]

    def target() -> torch.Tensor:
        return _column(tokens, stage.apply("target", stage.stats(tokens, "target")))

    if weight.is_one and not reorders:
        if stage.rules["target"].row - {"top"}:
            tokens = tokens.apply_cuts()
        rounded = torch.ceil if inclusive else torch.floor
        last_R1 = stage.cached("target", lambda: stage.at_least(rounded(target()).clamp(min=1.0) - 1.0))
        return _with_ties(tokens, constants.position_N <= last_R1) if ties else tokens.with_cut(last=last_R1)
    tokens = tokens.apply_cuts()
    if weight.is_softmax_weight and inclusive and not reorders and not ties:  # cumulative sums are sorted
        return tokens.with_cut(last=stage.at_least(torch.searchsorted(tokens.weight().cumsum(1), target())))
    below_RN, order_RN = tokens.below_RN, None
    if reorders:
        key_RN = stage.apply("order", below_RN, stage.stats(tokens, "order"))
        order_RN = torch.where(tokens.surviving(), key_RN, torch.inf).argsort(dim=1, stable=True)
        below_RN = below_RN.gather(1, order_RN)
    if weight.is_softmax_weight:
        weight_RN = below_RN.exp() if reorders else tokens.weight()
    else:
        weight_RN = torch.where(
            below_RN > -torch.inf, stage.apply("weight", below_RN, stage.stats(tokens, "weight")), 0.0
        )
    keep_RN = _until_target(constants, stage, weight_RN, target())
    if order_RN is not None:
        keep_RN = torch.zeros_like(keep_RN).scatter(1, order_RN, keep_RN)
    if ties:
        tokens = _with_ties(tokens, keep_RN)
        return tokens.filtered(tokens.surviving(), is_sorted=False) if reorders else tokens
    return tokens.filtered(keep_RN, is_sorted=not reorders)


def _until_target(constants: RowConstants, stage: BoundStage, weight_RN: Any, target_R1: Any) -> torch.Tensor:
    """The first tokens of an order, until their weights reach the target."""
    until_RN = weight_RN.cumsum(1)
    if stage.signature.kind.inclusive:  # type: ignore[attr-defined]
        keep_RN = torch.cat((constants.true_R1, (until_RN < target_R1)[:, :-1]), 1)
    else:
        keep_RN = (until_RN <= target_R1) | constants.first_N
    return keep_RN if stage.min_keep_R1 is None else keep_RN | (constants.position_N < stage.min_keep_R1)


def _with_ties(tokens: RankedTokens, keep_RN: torch.Tensor) -> RankedTokens:
    """Keep the tokens of a mask, and those with the same score as the last of them."""
    tokens = tokens.apply_cuts()
    least_R1 = torch.where(keep_RN & tokens.surviving(), tokens.x_RN, torch.inf).amin(1, keepdim=True)
    return tokens.filtered(keep_RN | (tokens.x_RN >= least_R1))


def _apply_ceiling(tokens: RankedTokens, stage: BoundStage, uniform_R1: Any, exempt_RK: Any) -> RankedTokens:
    threshold_R1 = _column(tokens, stage.apply("ceiling", stage.stats(tokens, "ceiling")))
    above_RN = tokens.below_RN >= threshold_R1.clamp(min=torch.finfo(tokens.constants.floats).min)
    dropped_R1 = torch.where(uniform_R1 < stage.attributes.act_probability, above_RN.sum(1, keepdim=True) - 1, 0)
    keep_RN = tokens.constants.position_N >= dropped_R1
    if exempt_RK is not None and exempt_RK.shape[1]:
        exempt_RP = torch.zeros_like(tokens.constants.neg_inf_RP, dtype=torch.bool)
        exempt_RP = torch.nn.functional.pad(exempt_RP, (0, 1)).scatter(1, exempt_RK, True)  # padding is >= V
        keep_RN = keep_RN | exempt_RP.gather(1, tokens.ids_RN)
    if stage.min_keep_R1 is not None:
        left_R1 = (keep_RN & tokens.surviving()).sum(1, keepdim=True)
        keep_RN = keep_RN | (left_R1 < stage.min_keep_R1)
    return tokens.filtered(keep_RN, is_sorted=False)


def _column(tokens: RankedTokens, value: Any) -> torch.Tensor:
    """The result of a rule as a tensor [R, 1]. It is a Python number if the rule reads no row."""
    column: torch.Tensor = value if isinstance(value, torch.Tensor) else tokens.constants.zero_1 + value
    return column.expand(len(tokens.constants.true_R1), 1) if column.dim() < 2 else column

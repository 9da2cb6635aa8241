"""Selects a token per row among the survivors, by the rules of a Draw."""

from __future__ import annotations

from dataclasses import replace

import torch

from nucleate.sampling.backends.torch.bound_stage import BoundStage
from nucleate.sampling.backends.torch.ranked_tokens import RankedTokens
from nucleate.sampling.backends.torch.tensor_philox import PhiloxKeys, uniform
from nucleate.sampling.noise import GROUP, GROUP_SIZE, TOKEN


def select_tokens(tokens: RankedTokens, stage: BoundStage, keys: PhiloxKeys, steps_R1: torch.Tensor) -> torch.Tensor:
    """The selected tokens: int64 [R, 1], -1 for invalid rows."""
    constants, uniforms = tokens.constants, stage.signature.kind.uniforms  # type: ignore[attr-defined]
    if uniforms == "one":
        u_R1 = uniform(keys, steps_R1, TOKEN, torch.zeros_like(steps_R1), constants.floats)
        return _inverse_cdf(replace(tokens.resorted(), full_mass_R1=None), stage, u_R1)
    below_RP = tokens.by_id(tokens.below_RN)
    if uniforms == "none":
        best_R1, token_R1 = _argmax_score(stage, below_RP, torch.zeros_like(below_RP))
        return torch.where(best_R1 > -torch.inf, token_R1, constants.no_token)
    mass_RG = below_RP.view(len(below_RP), -1, GROUP_SIZE).logsumexp(2)
    group_R1 = _argmax_score(stage, mass_RG, uniform(keys, steps_R1, GROUP, constants.groups_G, constants.floats))[1]
    ids_RT = constants.token_T.add(group_R1, alpha=GROUP_SIZE)
    u_RT = uniform(keys, steps_R1, TOKEN, ids_RT, constants.floats)
    best_R1, position_R1 = _argmax_score(stage, below_RP.gather(1, ids_RT), u_RT)
    return torch.where(best_R1 > -torch.inf, ids_RT.gather(1, position_R1), constants.no_token)


def _argmax_score(stage: BoundStage, x_RN: torch.Tensor, u_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest score with noise, and its first position. NaN counts as the highest."""
    score_RN = stage.apply("score", x_RN, u_RN)
    if not stage.rules["score"].is_linear:
        score_RN = score_RN.masked_fill(x_RN == -torch.inf, -torch.inf)
    best_R1, position_R1 = score_RN.max(1, keepdim=True)
    return best_R1, position_R1


def _inverse_cdf(tokens: RankedTokens, stage: BoundStage, u_R1: torch.Tensor) -> torch.Tensor:
    """The first token at which the cumulative weight reaches the target."""
    weight, target = (stage.rules[name] for name in ("weight", "target"))
    weight_RN = (
        tokens.weight()
        if weight.is_softmax_weight
        else stage.apply("weight", tokens.below_RN, tokens.stats(weight.row))
    )
    until_RN = torch.where(tokens.surviving(), weight_RN, tokens.constants.zero).cumsum(1)
    target_R1 = stage.apply("target", tokens.stats(target.row), u_R1)
    early_RN = torch.cat((target_R1 > 0, (until_RN < target_R1)[:, :-1]), 1) & tokens.surviving()
    position_R1 = torch.where(early_RN, tokens.constants.position_N, tokens.constants.no_token).amax(1, keepdim=True)
    return torch.where(position_R1 >= 0, tokens.ids_RN.gather(1, position_R1.clamp(min=0)), tokens.constants.no_token)

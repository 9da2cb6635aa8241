"""Selects the token of a Draw among the surviving tokens, for many rows as tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from nucleate.sampling.backends.torch.bound_stage import BoundStage
from nucleate.sampling.backends.torch.ranked_tokens import RankedTokens
from nucleate.sampling.backends.torch.tensor_philox import PhiloxKeys, uniform
from nucleate.sampling.noise import GROUP, GROUP_SIZE, TOKEN


def drawn(kept: RankedTokens, mine: BoundStage, keys: PhiloxKeys, steps_R1: torch.Tensor) -> torch.Tensor:
    """The tokens: int64 [R, 1], -1 where there is none."""
    fixed, uniforms = kept.fixed, mine.step.kind.uniforms  # type: ignore[attr-defined]
    if uniforms == "one":
        u_R1 = uniform(keys, steps_R1, TOKEN, torch.zeros_like(steps_R1), fixed.floats)
        return _walked(replace(kept.repacked(), whole_R1=None), mine, u_R1)
    below_RP = kept.by_id(kept.below_RN)
    if uniforms == "none":
        best_R1, token_R1 = _race(mine, below_RP, torch.zeros_like(below_RP))
        return torch.where(best_R1 > -torch.inf, token_R1, fixed.none)
    mass_RG = below_RP.view(len(below_RP), -1, GROUP_SIZE).logsumexp(2)
    group_R1 = _race(mine, mass_RG, uniform(keys, steps_R1, GROUP, fixed.groups_G, fixed.floats))[1]
    ids_RT = fixed.token_T.add(group_R1, alpha=GROUP_SIZE)
    u_RT = uniform(keys, steps_R1, TOKEN, ids_RT, fixed.floats)
    best_R1, place_R1 = _race(mine, below_RP.gather(1, ids_RT), u_RT)
    return torch.where(best_R1 > -torch.inf, ids_RT.gather(1, place_R1), fixed.none)


def _race(mine: BoundStage, x_RN: torch.Tensor, u_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest score with noise, and the first place that has it. NaN is above all others."""
    score_RN = mine.apply("score", x_RN, u_RN)
    if not mine.rules["score"].straight:
        score_RN = score_RN.masked_fill(x_RN == -torch.inf, -torch.inf)
    best_R1, place_R1 = score_RN.max(1, keepdim=True)
    return best_R1, place_R1


def _walked(kept: RankedTokens, mine: BoundStage, u_R1: torch.Tensor) -> torch.Tensor:
    """The last token before which the weights have not reached the target."""
    weight, target = (mine.rules[name] for name in ("weight", "target"))
    weight_RN = kept.weight() if weight.sums else mine.apply("weight", kept.below_RN, kept.row(weight.row))
    until_RN = torch.where(kept.inside(), weight_RN, kept.fixed.zero).cumsum(1)
    goal_R1 = mine.apply("target", kept.row(target.row), u_R1)
    early_RN = torch.cat((goal_R1 > 0, (until_RN < goal_R1)[:, :-1]), 1) & kept.inside()
    place_R1 = torch.where(early_RN, kept.fixed.place_N, kept.fixed.none).amax(1, keepdim=True)
    return torch.where(place_R1 >= 0, kept.ids_RN.gather(1, place_R1.clamp(min=0)), kept.fixed.none)

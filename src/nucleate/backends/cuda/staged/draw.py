"""The token that a Draw takes of those that are in, for rows as tensors. Knows no stage."""

from __future__ import annotations

from typing import Any

import torch

from nucleate.backends.cuda.noise import GROUP, GROUP_SIZE, TOKEN, uniform
from nucleate.backends.cuda.staged.bind import Mine
from nucleate.backends.cuda.staged.kept import Kept, by_id, statistics
from nucleate.backends.cuda.staged.narrow import before

Race = tuple[torch.Tensor, torch.Tensor]
"""The place of the winner, [R, 1]; and whether there is one."""


def drawn(kept: Kept, mine: Mine, seeds_R1: torch.Tensor, steps_R1: torch.Tensor) -> torch.Tensor:
    """The tokens: int64 [R], -1 where there is none."""
    if mine.step.kind.uniforms == "one":  # type: ignore[attr-defined]
        return _walked(kept, mine, uniform(seeds_R1, steps_R1, TOKEN, torch.zeros_like(seeds_R1), kept.x_RN.dtype))
    rows, size = kept.x_RN.shape
    padded = -(-size // GROUP_SIZE) * GROUP_SIZE
    below_RV = by_id(kept, padded) - kept.x_RN.amax(1, keepdim=True)
    if mine.step.kind.uniforms == "none":  # type: ignore[attr-defined]
        place_R1, there_R1 = _race(mine.say("score", below_RV, torch.zeros_like(below_RV)), below_RV > -torch.inf)
        return torch.where(there_R1, place_R1, -1)[:, 0]
    below_RGT = below_RV.view(rows, -1, GROUP_SIZE)
    mass_RG = below_RGT.logsumexp(2)
    groups_G = torch.arange(mass_RG.shape[1], device=mass_RG.device)
    u_RG = uniform(seeds_R1, steps_R1, GROUP, groups_G, kept.x_RN.dtype)
    group_R1, found_R1 = _race(mine.say("score", mass_RG, u_RG), (below_RGT > -torch.inf).any(2))
    ids_RT = group_R1 * GROUP_SIZE + torch.arange(GROUP_SIZE, device=mass_RG.device)
    below_RT, u_RT = below_RV.gather(1, ids_RT), uniform(seeds_R1, steps_R1, TOKEN, ids_RT, kept.x_RN.dtype)
    place_R1, there_R1 = _race(mine.say("score", below_RT, u_RT), below_RT > -torch.inf)
    return torch.where(found_R1 & there_R1, ids_RT.gather(1, place_R1), -1)[:, 0]


def _race(score_RN: Any, inside_RN: torch.Tensor) -> Race:
    """The first of the highest scores among those that are in; there is none where one is NaN."""
    score_RN = torch.where(inside_RN, score_RN, -torch.inf)
    best_RN = (score_RN == score_RN.amax(1, keepdim=True)) & inside_RN
    return best_RN.to(torch.int8).argmax(1, keepdim=True), best_RN.any(1, keepdim=True)


def _walked(kept: Kept, mine: Mine, u_R1: torch.Tensor) -> torch.Tensor:
    """The last token before which the weights have not reached the target."""
    alone = kept._replace(top_R1=torch.full_like(kept.top_R1, -torch.inf))
    weight_RN = mine.say("weight", kept.below, statistics(alone, mine.reads("weight")))
    until_RN = torch.where(kept.inside, weight_RN, 0.0).cumsum(1)
    goal_R1 = mine.say("target", statistics(alone, mine.reads("target")), u_R1)
    early_RN = kept.inside & (before(until_RN) < goal_R1)
    place_N = torch.arange(early_RN.shape[1], device=early_RN.device)
    place_R1 = torch.where(early_RN, place_N, -1).amax(1, keepdim=True)
    return torch.where(place_R1 >= 0, kept.ids_RN.gather(1, place_R1.clamp(min=0)), -1)[:, 0]

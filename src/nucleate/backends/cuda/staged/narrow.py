"""A template per shape: what a stage leaves of the tokens of rows. Sort and walk, as the reference does."""

from __future__ import annotations

from typing import Any

import torch

from nucleate.backends.cuda.staged.bind import Mine
from nucleate.backends.cuda.staged.kept import Kept, by_id, first, statistics, uncut


def narrowed(kept: Kept, mine: Mine, coins_R1: torch.Tensor | None, spared_RK: torch.Tensor | None) -> Kept:
    """The tokens after a stage that is neither a Tap nor a Draw. coins_R1: those of the step."""
    if mine.step.greedy:
        return kept.only(first(kept.inside))
    match mine.step.shape:
        case "Scale":
            return _scaled(kept, mine)
        case "Floor":
            cut_R1 = mine.say("floor", statistics(kept, mine.reads("floor")))
            return kept.only((kept.below >= cut_R1) | first(kept.inside))
        case "Prefix":
            return _prefix(kept, mine)
    return _beheaded(kept, mine, coins_R1, spared_RK)


def _scaled(kept: Kept, mine: Mine) -> Kept:
    inside_RN, said = kept.inside, mine.say("apply", kept.below, statistics(kept, mine.reads("apply")))
    x_RN = torch.where(inside_RN, said, -torch.inf)
    there_R1 = (x_RN < torch.inf).all(1, keepdim=True) & (x_RN > -torch.inf).any(1, keepdim=True)
    odd_R1 = kept.odd_R1 | ~there_R1
    x_RN, ids_RN = torch.where(odd_R1, 0.0, x_RN), kept.ids_RN
    if not mine.step.kind.monotone:  # type: ignore[attr-defined]
        x_RN = by_id(kept._replace(x_RN=x_RN), x_RN.shape[1])
        ids_RN = torch.arange(x_RN.shape[1], device=x_RN.device).expand_as(x_RN)
    x_RN, place_RN = torch.sort(x_RN, dim=1, descending=True, stable=True)
    return uncut(ids_RN.gather(1, place_RN), x_RN, odd_R1)


def _prefix(kept: Kept, mine: Mine) -> Kept:
    inside_RN, below_RN = kept.inside, kept.below
    place_RN = None
    if mine.has("order"):
        key_RN = mine.say("order", below_RN, statistics(kept, mine.reads("order")))
        place_RN = torch.argsort(torch.where(inside_RN, key_RN, torch.inf), dim=1, stable=True)
        inside_RN, below_RN = inside_RN.gather(1, place_RN), below_RN.gather(1, place_RN)
    weight_RN = mine.say("weight", below_RN, statistics(kept, mine.reads("weight")))
    weight_RN = torch.where(inside_RN, weight_RN, 0.0)
    goal_R1 = mine.say("target", statistics(kept, mine.reads("target")))
    until_RN = weight_RN.cumsum(1)
    reaches = mine.step.kind.reaches  # type: ignore[attr-defined]
    keep_RN = before(until_RN) < goal_R1 if reaches else until_RN <= goal_R1
    keep_RN = (keep_RN | first(inside_RN)) & inside_RN
    if place_RN is not None:
        keep_RN = torch.zeros_like(keep_RN).scatter(1, place_RN, keep_RN)
    if mine.step.ties:
        least_R1 = torch.where(keep_RN, kept.x_RN, torch.inf).amin(1, keepdim=True)
        keep_RN = keep_RN | (kept.x_RN >= least_R1)
    return kept.only(keep_RN)


def before(until_RN: torch.Tensor) -> torch.Tensor:
    """Of sums up to and with each token those before it."""
    return torch.cat((torch.zeros_like(until_RN[:, :1]), until_RN[:, :-1]), 1)


def _beheaded(kept: Kept, mine: Mine, coins_R1: Any, spared_RK: Any) -> Kept:
    cut_R1 = mine.say("ceiling", statistics(kept, mine.reads("ceiling")))
    above_RN = kept.inside & (kept.below >= cut_R1)
    place_N = torch.arange(above_RN.shape[1], device=above_RN.device)
    last_R1 = torch.where(above_RN, place_N, -1).amax(1, keepdim=True)
    keep_RN = ~above_RN | (coins_R1 >= mine.me.chance) | (place_N == last_R1)
    if spared_RK is not None:
        for spared_R in spared_RK.unbind(1):
            keep_RN = keep_RN | (kept.ids_RN == spared_R[:, None])
    return kept.only(keep_RN)

"""Verification of drafts as tensor code: what stays of the drafts of many rows, and the token after it.

The rules are ``coupled`` and ``rejection`` of ``engine.verify``, for chains, with the same noise, so that tokens are
the same. No shape depends on a value and nothing waits for the device: it may be part of a CUDA graph, and
``torch.compile`` takes it whole. Knows neither models nor proposers, nor where laws come from.

Shapes: R rows, K drafted tokens at most, N = K + 1 places, S stop ids at most. A draft ends before its first token that
is none, as -1, so that rows of one call may have drafts of different lengths, or none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nucleate.backends.cuda.noise import uniform
from nucleate.core.noise import ACCEPT, RESIDUAL

NO_TOKEN = -1


class Verified(NamedTuple):
    """How rows go on. The next round of a row is at its step + kept + 1."""

    kept_R: torch.Tensor  #: int64: so many drafted tokens stay, and come before the last
    tokens_RN: torch.Tensor  #: int64: those that stay, and the last; NO_TOKEN behind it
    last_R: torch.Tensor  #: int64: the token that follows those that stay; NO_TOKEN where none can be drawn
    ended_R: torch.Tensor  #: bool: whether it is a stop id
    failed_R: torch.Tensor  #: bool: whether none can be drawn


def coupled(drafted_RK: torch.Tensor, drawn_RN: torch.Tensor, stops_RS: torch.Tensor | None = None) -> Verified:
    """Keep what was drafted while it is what was drawn (Daliri, Musco, Suresh, arXiv 2408.07978).

    drawn_RN: the draws of the target at all places, each with the noise of its step, and as if the tokens drafted
    before it had been said; NO_TOKEN where none can be drawn, an error only where it is come to. stops_RS: ids with
    which a row ends, NO_TOKEN where there are fewer. All are int64. Raises ValueError for shapes that do not fit.
    """
    rows, count = drafted_RK.shape
    if drawn_RN.shape != (rows, count + 1):
        raise ValueError(f"{count} drafted tokens have {count + 1} places, got draws of {list(drawn_RN.shape)}")
    ahead_RK = drawn_RN[:, :count]
    same_RK = (drafted_RK == ahead_RK) & (ahead_RK >= 0)
    place_R = first_not(same_RK & ~among(ahead_RK, stops_RS))
    last_R = drawn_RN.gather(1, place_R[:, None])[:, 0]
    return verified(drafted_RK, place_R, last_R, stops_RS)


def rejection(
    p_RNV: torch.Tensor,
    drafted_RK: torch.Tensor,
    q_RKV: torch.Tensor | None,
    coins_RK: torch.Tensor,
    coin_R: torch.Tensor,
    stops_RS: torch.Tensor | None = None,
) -> Verified:
    """Keep a token with chance min(1, p / q), or else draw from what p has over q (arXiv 2211.17192, 2302.01318).

    p_RNV: the chances of the target after its whole pipeline, at all places, each as if the tokens drafted before it
    had been said; any float, taken as weights. A row with NaN, negative or infinite ones, or none above 0, gives no
    token, an error only where it is come to. q_RKV: what each token was drawn from, likewise; None: no token could
    have been another. A draft ends before a token whose law is none, or could not have given it. coins_RK, coin_R: see
    ``coins`` and ``last_coin``; what follows from them is worked out in their type. stops_RS: see ``coupled``. Raises
    ValueError for shapes that do not fit.
    """
    check(p_RNV, drafted_RK, q_RKV)
    dtype, (rows, count), size = coin_R.dtype, drafted_RK.shape, p_RNV.shape[2]
    inside_RK = (drafted_RK >= 0) & (drafted_RK < size)
    ids_RK = torch.where(inside_RK, drafted_RK, 0)
    p_sum_RN, is_law_RN = weighed(p_RNV, dtype)
    chance_RK = p_RNV[:, :count].gather(2, ids_RK[:, :, None])[:, :, 0].to(dtype) / p_sum_RN[:, :count]
    tried_RK, given_RK = inside_RK & is_law_RN[:, :count], torch.ones_like(chance_RK)
    q_sum_RK = given_RK
    if q_RKV is not None:
        q_sum_RK, is_q_RK = weighed(q_RKV, dtype)
        given_RK = q_RKV.gather(2, ids_RK[:, :, None])[:, :, 0].to(dtype) / q_sum_RK
        tried_RK = tried_RK & is_q_RK & (given_RK > 0)
    stays_RK = tried_RK & (coins_RK * given_RK < chance_RK)
    place_R = first_not(stays_RK & ~among(drafted_RK, stops_RS))
    row_R = torch.arange(rows, device=p_RNV.device)
    law_RV = p_RNV[row_R, place_R].to(dtype) / p_sum_RN[row_R, place_R][:, None]
    if count:
        at_R = place_R.clamp(max=count - 1)
        if q_RKV is None:
            given_RV = (torch.arange(size, device=p_RNV.device) == ids_RK[row_R, at_R][:, None]).to(dtype)
        else:
            given_RV = q_RKV[row_R, at_R].to(dtype) / q_sum_RK[row_R, at_R][:, None]
        law_RV = torch.where(at_place(tried_RK, place_R)[:, None], over(law_RV, given_RV), law_RV)
    drawn_R = torch.where(is_law_RN[row_R, place_R], choose(law_RV, coin_R), NO_TOKEN)
    said_R = at_place(stays_RK, place_R)  # it stays, and the row ends with it
    last_R = torch.where(said_R, at_place(drafted_RK, place_R), drawn_R)
    return verified(drafted_RK, place_R, last_R, stops_RS)


def coins(seeds_R: torch.Tensor, steps_R: torch.Tensor, count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What decides on the drafted tokens of the round that begins at a step: ``engine.verify.coins``, [R, count].

    seeds_R, steps_R: int64, the bits of integers in 0..2**64 - 1. dtype: see ``noise.uniform``.
    """
    places_K = torch.arange(count, device=seeds_R.device)
    return uniform(seeds_R[:, None], steps_R[:, None], ACCEPT, places_K, dtype)


def last_coin(seeds_R: torch.Tensor, steps_R: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What chooses the token after those that stay: ``engine.verify.last_coin``, [R]."""
    return uniform(seeds_R, steps_R, RESIDUAL, torch.zeros_like(seeds_R), dtype)


def choose(weights_RV: torch.Tensor, u_R: torch.Tensor) -> torch.Tensor:
    """The token at which the sum of the weights, in the order of ids, exceeds u of the whole: int64 [R].

    A device adds in an order of its own, and sums need not grow with each id: only a weight above 0 can be chosen.
    """
    size = weights_RV.shape[1]
    ids_V = torch.arange(size, device=weights_RV.device)
    sums_RV, there_RV = weights_RV.cumsum(1), weights_RV > 0
    beyond_RV = there_RV & (sums_RV > (u_R * sums_RV[:, -1])[:, None])
    first_R = torch.where(beyond_RV, ids_V, size).amin(1)
    return torch.where(first_R < size, first_R, torch.where(there_RV, ids_V, 0).amax(1))


def over(p_RV: torch.Tensor, q_RV: torch.Tensor) -> torch.Tensor:
    """What p has over q. Where that is nothing, as where they are equal, it is not come to but by rounding: then p."""
    over_RV = (p_RV - q_RV).clamp(min=0)
    return torch.where(over_RV.sum(1, keepdim=True) > 0, over_RV, p_RV)


def weighed(weights_RNV: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of weights, and whether these are a law: both [R, N]."""
    sum_RN = weights_RNV.sum(2, dtype=dtype)
    return sum_RN, (sum_RN > 0) & (sum_RN < torch.inf) & (weights_RNV.amin(2) >= 0)


def first_not(going_RK: torch.Tensor) -> torch.Tensor:
    """The first place at which a row does not go on; K if there is none: int64 [R]."""
    return going_RK.to(torch.int64).cumprod(1).sum(1)


def at_place(x_RK: torch.Tensor, place_R: torch.Tensor) -> torch.Tensor:
    """What is at a place of each row; behind the draft 0."""
    return torch.nn.functional.pad(x_RK, (0, 1)).gather(1, place_R[:, None])[:, 0]


def among(tokens_RK: torch.Tensor, stops_RS: torch.Tensor | None) -> torch.Tensor:
    """Which tokens are stop ids of their row."""
    if stops_RS is None:
        return torch.zeros_like(tokens_RK, dtype=torch.bool)
    return (tokens_RK[:, :, None] == stops_RS[:, None, :]).any(2) & (tokens_RK >= 0)


def verified(
    drafted_RK: torch.Tensor, place_R: torch.Tensor, last_R: torch.Tensor, stops_RS: torch.Tensor | None
) -> Verified:
    """The first drafted tokens, and one more."""
    places_N = torch.arange(drafted_RK.shape[1] + 1, device=drafted_RK.device)
    path_RN = torch.nn.functional.pad(drafted_RK, (0, 1))
    rest_RN = torch.where(places_N == place_R[:, None], last_R[:, None], NO_TOKEN)
    tokens_RN = torch.where(places_N < place_R[:, None], path_RN, rest_RN)
    return Verified(place_R, tokens_RN, last_R, among(last_R[:, None], stops_RS)[:, 0], last_R < 0)


def check(p_RNV: torch.Tensor, drafted_RK: torch.Tensor, q_RKV: torch.Tensor | None) -> None:
    """Raise ValueError for shapes that do not fit."""
    (rows, count), size = drafted_RK.shape, p_RNV.shape[-1]
    if p_RNV.shape != (rows, count + 1, size) or size == 0:
        expected = f"[{rows}, {count + 1}, vocabulary]"
        raise ValueError(f"the target's laws at the places of {count} tokens are {expected}, got {list(p_RNV.shape)}")
    if q_RKV is not None and q_RKV.shape != (rows, count, size):
        raise ValueError(f"the laws of drafted tokens must be {[rows, count, size]}, got {list(q_RKV.shape)}")

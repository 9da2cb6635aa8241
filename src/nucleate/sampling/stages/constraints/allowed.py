"""Bans of single tokens: by a list, by a list of the others, or by the bitmask of a step (as from a grammar)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.sampling.maths import INFINITY
from nucleate.sampling.stage import History, Shift, TokenInfo, param


class Allowed(Shift):
    """Ban all tokens except the given ones."""

    rank = 33
    touches = "unlisted"
    ids: tuple[int, ...] | None = param(
        "The only token ids that may be sampled", neutral=None, low=0, name="allowed_token_ids"
    )

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x - INFINITY

    def listing(self, history: History) -> Mapping[int, float]:
        return dict.fromkeys(self.ids or (), 0.0)


class Suppress(Shift):
    """Ban given tokens."""

    rank = 32
    touches = "listed"
    ids: tuple[int, ...] = param("Token ids that are never sampled", neutral=(), low=0, name="suppress_token_ids")

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.listed

    def listing(self, history: History) -> Mapping[int, float]:
        return dict.fromkeys(self.ids, -INFINITY)


class Mask(Shift):
    """Ban all tokens whose bit in the step's mask is 0; without a mask, do nothing."""

    rank = 39
    touches = "masked"

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x - INFINITY

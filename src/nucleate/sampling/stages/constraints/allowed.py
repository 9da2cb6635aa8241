"""Allowed tokens: all others are banned."""

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

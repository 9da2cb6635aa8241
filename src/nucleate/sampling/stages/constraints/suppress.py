"""Suppressed tokens: ids that are never sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.sampling.maths import INFINITY
from nucleate.sampling.stage import History, Shift, TokenInfo, param


class Suppress(Shift):
    """Ban given tokens."""

    rank = 32
    touches = "listed"
    ids: tuple[int, ...] = param("Token ids that are never sampled", neutral=(), low=0, name="suppress_token_ids")

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.listed

    def listing(self, history: History) -> Mapping[int, float]:
        return dict.fromkeys(self.ids, -INFINITY)

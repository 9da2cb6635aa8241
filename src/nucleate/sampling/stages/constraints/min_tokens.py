"""Minimum length. The other half, not to look for stop strings yet, is the stop matcher's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.sampling.maths import INFINITY
from nucleate.sampling.stage import History, Shift, TokenInfo, param


class MinTokens(Shift):
    """Ban the tokens that end a request until its output has a minimum length."""

    rank = 30
    touches = "listed"
    n: int = param("no end before this many tokens of output", neutral=0, low=0, name="min_tokens")
    ends: tuple[int, ...] = param("the ids that end the request: EOS and stop ids", default=(), low=0, public=False)

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.listed

    def listing(self, history: History) -> Mapping[int, float]:
        return dict.fromkeys(self.ends, -INFINITY) if len(history.output) < self.n else {}

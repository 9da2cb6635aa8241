"""Logit bias. Refuses to clamp: OpenAI's range of -100..100 is a habit of its server, not of the method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.sampling.stage import History, Shift, TokenInfo, param


class LogitBias(Shift):
    """Add a number to the logits of given tokens."""

    rank = 10
    touches = "listed"
    bias: Mapping[int, float] = param("{token id: number added to its logit}", neutral={})

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.listed

    def listing(self, history: History) -> Mapping[int, float]:
        return self.bias

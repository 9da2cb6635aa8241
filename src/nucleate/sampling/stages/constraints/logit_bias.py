"""Logit bias, without OpenAI's limit of -100 to 100, which belongs to its API and not to the method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.sampling.stage import History, Shift, TokenInfo, param


class LogitBias(Shift):
    """Add a number to the logits of given tokens."""

    rank = 10
    touches = "listed"
    bias: Mapping[int, float] = param("Map from token id to a number that is added to its logit", neutral={})

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.listed

    def listing(self, history: History) -> Mapping[int, float]:
        return self.bias

"""The token bitmask of a step, for example from a grammar. It is passed with the logits and is no parameter."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import INFINITY
from nucleate.sampling.stage import Shift, TokenInfo


class Mask(Shift):
    """Ban all tokens whose bit in the step's mask is 0; without a mask, do nothing."""

    rank = 39
    touches = "masked"

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x - INFINITY

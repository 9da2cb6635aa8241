"""The mask of a grammar. What the mask says is no parameter: it comes with each step, packed, beside the logits."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import INFINITY
from nucleate.sampling.stage import Shift, TokenInfo


class Mask(Shift):
    """Ban every token that the bitmask of the step forbids; without one, do nothing."""

    rank = 39
    touches = "masked"

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x - INFINITY

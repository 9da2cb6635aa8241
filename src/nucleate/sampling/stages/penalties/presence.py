"""Presence penalty, as OpenAI's API defines it: counts the output, not the prompt."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.stage import Shift, TokenInfo, param
from nucleate.sampling.stages.penalties.repetition import penalty_window


class Presence(Shift):
    """Subtract a penalty from the logits of all tokens that occur in the output."""

    rank = 22
    touches = "output"
    a: float = param(
        "Subtracted from a token's logit if it occurs in the output",
        neutral=0.0,
        low=-2.0,
        high=2.0,
        name="presence_penalty",
    )
    last_n: int | None = penalty_window()

    @property
    def window(self) -> int | None:
        return self.last_n

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x - self.a

"""Frequency penalty, as OpenAI's API defines it: counts the output, not the prompt."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.stage import Shift, TokenInfo, param
from nucleate.sampling.stages.penalties.repetition import penalty_window


class Frequency(Shift):
    """Subtract a penalty from a token's logit for each time it occurs in the output."""

    rank = 21
    touches = "output"
    f: float = param(
        "Subtracted from a token's logit for each time it occurs in the output",
        neutral=0.0,
        low=-2.0,
        high=2.0,
        name="frequency_penalty",
    )
    last_n: int | None = penalty_window()

    @property
    def window(self) -> int | None:
        return self.last_n

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x - self.f * token.output_count

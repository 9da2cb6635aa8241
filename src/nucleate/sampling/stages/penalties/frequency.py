"""Frequency penalty, as OpenAI's API defines it: the output counts, the prompt does not."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.stage import Shift, TokenInfo, param
from nucleate.sampling.stages.penalties.repetition import penalty_window


class Frequency(Shift):
    """Make a token of the output less likely with every time it occurred."""

    rank = 21
    touches = "output"
    f: float = param(
        "subtracted from a logit once for every time the token is in the output",
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

"""Repetition penalty (Keskar et al.: CTRL, arXiv 1909.05858), in the signed form that all engines use."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import where
from nucleate.sampling.stage import Shift, TokenInfo, param


def penalty_window() -> Any:
    """The parameter that the three penalties share."""
    return param(
        "the penalties count the last n tokens of prompt and output (-1: all); "
        "none: repetition counts all of both, the others all of the output",
        default=None,
        low=-1,
        name="penalty_last_n",
    )


class Repetition(Shift):
    """Make every token of prompt or output less likely, once, however often it was seen."""

    rank = 20
    touches = "seen"
    r: float = param(
        "divides positive and multiplies negative logits of tokens seen before; below 1 it rewards them",
        neutral=1.0,
        low=0.0,
        open_low=True,
        name="repetition_penalty",
    )
    last_n: int | None = penalty_window()

    @property
    def window(self) -> int | None:
        return self.last_n

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return where(x > 0, x / self.r, x * self.r)

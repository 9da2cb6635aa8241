"""Repetition penalty (Keskar et al.: CTRL, arXiv 1909.05858), in the signed form that other engines use."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import where
from nucleate.sampling.stage import Shift, TokenInfo, param


def penalty_window() -> Any:
    """The parameter that repetition, frequency and presence penalty share."""
    return param(
        "Number of last tokens of prompt and output that the penalties count (-1: all); "
        "none: repetition counts prompt and output, frequency and presence the output",
        default=None,
        low=-1,
        name="penalty_last_n",
    )


class Repetition(Shift):
    """Penalise every token that occurs in prompt or output, regardless of how often."""

    rank = 20
    touches = "seen"
    r: float = param(
        "Divides positive and multiplies negative logits of tokens that occurred; below 1 it rewards them",
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

"""Penalties of tokens that occurred.

Repetition: Keskar et al., CTRL, arXiv 1909.05858, in the signed form that other engines use. Frequency and presence: as
OpenAI's API defines them, of the output without the prompt. Encoder repetition: Transformers, and text-generation-webui
for models with a decoder only.
"""

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


class EncoderRepetition(Shift):
    """Reward every token that occurs in the prompt, against text that leaves the prompt's subject."""

    rank = 19
    touches = "seen"
    r: float = param(
        "Multiplies positive and divides negative logits of tokens of the prompt; above 1 it rewards them",
        neutral=1.0,
        low=0.0,
        open_low=True,
        name="encoder_repetition_penalty",
    )

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return where(token.prompt_count > 0, where(x > 0, x * self.r, x / self.r), x)

"""Encoder repetition penalty (in Transformers, and in text-generation-webui for models with a decoder only)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import where
from nucleate.sampling.stage import Shift, TokenInfo, param


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

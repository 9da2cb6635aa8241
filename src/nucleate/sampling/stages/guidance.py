"""Stages that combine the logits of two sequences.

Classifier-free guidance: Sanchez et al., arXiv 2306.17806. Contrastive decoding: Li et al., arXiv 2210.15097, with the
parameters of its authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.maths import INFINITY, SLACK, log, log_softmax, where
from nucleate.sampling.stage import MAX_WEIGHT, Combine, TextEncoder, param


class Guidance(Combine):
    """Follow the prompt more closely than a negative prompt (classifier-free guidance)."""

    rank = -2
    prompt_field = "negative_prompt"
    scale: float = param(
        "Guidance scale: above 1 strengthens the prompt against the negative prompt",
        neutral=1.0,
        low=-MAX_WEIGHT,
        high=MAX_WEIGHT,
        name="guidance_scale",
    )
    negative_prompt: str | tuple[int, ...] = param(
        "Prompt that guidance moves away from, as text or token ids; none: the last token of the prompt",
        default=(),
        low=0,
        name="negative_prompt",
    )

    def encode_text(self, tokenizer: TextEncoder) -> Self:
        text = self.negative_prompt
        return replace(self, negative_prompt=tuple(tokenizer.encode(text))) if isinstance(text, str) else self

    def companion_prompt(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        if isinstance(self.negative_prompt, str):
            given = f"{self.negative_prompt!r:.60}"
            raise ParameterError("negative_prompt", f"negative_prompt needs a tokenizer for the text {given}")
        return self.negative_prompt or prompt_ids[-1:]

    def apply(self, x: Any, other: Any) -> Any:
        return other + self.scale * (x - other)


class Contrastive(Combine):
    """Prefer tokens that the model finds more likely than a weaker companion model (contrastive decoding)."""

    companion_model = True
    beta: float = param(
        "Weight of the companion model's log-probabilities, which are subtracted; 1 as in the paper",
        neutral=0.0,
        low=0.0,
        high=MAX_WEIGHT,
        name="contrastive_beta",
    )
    alpha: float = param(
        "Plausibility: minimum probability, relative to the model's most likely token",
        low=0.0,
        high=1.0,
        default=0.1,
        open_low=True,
        name="contrastive_alpha",
    )
    tau: float = param(
        "Temperature of the companion model", default=1.0, low=1 / MAX_WEIGHT, name="contrastive_temperature"
    )

    def apply(self, x: Any, other: Any) -> Any:
        plausible = x >= x.max() + (log(self.alpha) - SLACK)
        other = other if self.tau == 1.0 else log_softmax(other / self.tau)
        return where(plausible, x - self.beta * other, -INFINITY)

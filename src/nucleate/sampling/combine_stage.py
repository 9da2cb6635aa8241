"""The base class of stages that combine two sequences: guidance and contrastive decoding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from nucleate.sampling.rule_inputs import Scores
from nucleate.sampling.stage_base import Stage

MAX_WEIGHT = 1e6
"""Maximum weight of a difference of log-probabilities, so that combined scores are finite in float32."""


class Combine(Stage):
    """Combines the logits of a sequence with those of its companion: guidance, contrastive decoding.

    The companion is a second sequence with the same output, after another prompt or on another model. A pipeline has at
    most one Combine, its first stage. It runs before all backends. Define ``apply``, and ``companion_prompt`` or
    ``companion_model``. For example::

        class Guidance(Combine):
            scale: float = param("Guidance scale", neutral=1.0)
            def companion_prompt(self, prompt_ids):
                return prompt_ids[-1:]
            def apply(self, x, other):
                return other + self.scale * (x - other)
    """

    rank: ClassVar[float] = -1
    companion_model: ClassVar[bool] = False
    """Whether the companion runs on the companion model (``LLM(companion_model=...)``), not on the same model."""
    prompt_field: ClassVar[str] = "prompt"
    """The field that sets the companion's prompt, for error messages."""

    @abstractmethod
    def apply(self, x: Scores, other: Scores) -> Scores:
        """Return the new scores [V] of all tokens. x, other: the log-probabilities [V] of both, NumPy or torch."""

    def companion_prompt(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """Return the token ids of the companion's prompt, by default the same."""
        return prompt_ids

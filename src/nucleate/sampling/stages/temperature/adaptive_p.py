"""Adaptive-p (MrJackSpade and others, https://github.com/ggml-org/llama.cpp/pull/17927)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from nucleate.sampling.maths import absolute, exp, log, maximum, minimum
from nucleate.sampling.stage import RowStats, SampledToken, Scale, param


class AdaptiveP(Scale):
    """Favour tokens with a probability near a target, which adapts so that sampled tokens average it."""

    rank = 90
    monotone = False
    target: float | None = param(
        "Target probability of sampled tokens", neutral=None, low=0.0, high=1.0, name="adaptive_p_target"
    )
    decay: float = param(
        "Decay, per token, of the weight of earlier tokens in the mean",
        default=0.9,
        low=0.0,
        high=0.99,
        name="adaptive_p_decay",
    )
    mean: float | None = param(
        "Mean probability of the sampled tokens; initially the target", default=None, public=False
    )

    def verify(self) -> None:
        if self.mean is None:
            object.__setattr__(self, "mean", self.target)

    def update(self, token: SampledToken) -> Self:
        mean = self.decay * self.mean + (1.0 - self.decay) * exp(token.logprob_before)  # type: ignore[operator]  # see verify
        return replace(self, mean=mean)

    def apply(self, x: Any, row: RowStats) -> Any:
        aim = minimum(maximum(2.0 * self.target - self.mean, 0.0), 1.0)  # type: ignore[operator]  # see verify
        far = absolute(exp(x - row.top - log(row.mass)) - aim) * (1.0 / 0.3)
        return 5.0 - 10.0 * far * far / (1.0 + far)

"""Temperature, and transforms of all scores that are related to it.

Dynamic temperature: kalomaze, https://github.com/ggml-org/llama.cpp/pull/4972. Quadratic or smooth sampling: kalomaze,
https://github.com/oobabooga/text-generation-webui/pull/5403. Adaptive-p: MrJackSpade and others,
https://github.com/ggml-org/llama.cpp/pull/17927.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.maths import absolute, exp, log, maximum, minimum
from nucleate.sampling.stage import RowStats, SampledToken, Scale, param


class Temperature(Scale):
    """Divide the scores by the temperature: below 1 sharpens the distribution, above 1 flattens it; 0 is greedy."""

    rank = 50
    t: float = param(
        "Divides the logits; below 1 sharpens the distribution, 0 selects the most likely token", neutral=1.0, low=0.0
    )

    @property
    def greedy(self) -> bool:
        return self.t == 0

    def apply(self, x: Any, row: RowStats) -> Any:
        return (x - row.top) / self.t  # from the top, so that no temperature overflows


LEAST = 1e-30


class DynamicTemperature(Scale):
    """Temperature between low and high that rises with the entropy of the distribution."""

    rank = 51
    low: float | None = param("Temperature at zero entropy", neutral=None, low=0.0, name="dynamic_temperature_low")
    high: float | None = param("Temperature at maximum entropy", neutral=None, low=0.0, name="dynamic_temperature_high")
    exponent: float = param(
        "Exponent of the normalised entropy", default=1.0, low=0.0, name="dynamic_temperature_exponent"
    )

    def verify(self) -> None:
        if (self.low is None) != (self.high is None):
            missing = "dynamic_temperature_low" if self.low is None else "dynamic_temperature_high"
            raise ParameterError(missing, f"{missing} must be given: dynamic temperature needs low and high")
        if self.low is not None and self.high is not None and self.low > self.high:
            field = "dynamic_temperature_low"
            raise ParameterError(
                field, f"{field} must be at most dynamic_temperature_high ({self.high:g}), got {self.low:g}"
            )

    @property
    def greedy(self) -> bool:
        return self.high == 0

    def apply(self, x: Any, row: RowStats) -> Any:
        part = minimum(row.entropy / maximum(log(row.n), LEAST), 1.0)  # of one token, 0
        power = exp(self.exponent * log(maximum(part, LEAST)))
        return (x - row.top) / maximum(self.low + (self.high - self.low) * power, LEAST)  # type: ignore[operator]  # see verify


class Quadratic(Scale):
    """Replace the distance d of a score from the highest by a quadratic, and with a curve above 1 cubic, function."""

    rank = 52
    factor: float = param(
        "Factor of the squared distance from the highest logit; below 1 flattens the top; 0: off",
        neutral=0.0,
        low=0.0,
        name="smoothing_factor",
    )
    curve: float = param(
        "1: quadratic; up to 3, cubic: unlikely tokens lose more",
        default=1.0,
        low=1.0,
        high=3.0,
        name="smoothing_curve",
    )

    def apply(self, x: Any, row: RowStats) -> Any:
        d = row.top - x
        return -0.5 * self.factor * d * d * (3.0 - self.curve + (self.curve - 1.0) * d)


class AdaptiveP(Scale):
    """Favour tokens with a probability near a target, which adapts so that sampled tokens average it."""

    rank = 90
    monotone = False
    target: float | None = param(
        "Target probability of sampled tokens", low=0.0, high=1.0, neutral=None, name="adaptive_p_target"
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

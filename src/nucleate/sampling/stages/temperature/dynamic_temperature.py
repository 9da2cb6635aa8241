"""Dynamic temperature (kalomaze, https://github.com/ggml-org/llama.cpp/pull/4972)."""

from __future__ import annotations

from typing import Any

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.maths import exp, log, maximum, minimum
from nucleate.sampling.stage import RowStats, Scale, param

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

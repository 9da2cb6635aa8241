"""Fading temperature: a text begins wildly and calms down. A stage with state."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from nucleate.sampling.stage import RowStats, SampledToken, Scale, param


class FadingTemperature(Scale):
    """Divide the scores by a temperature that falls towards 1 with every token."""

    rank = 50.75  # right after temperature
    extra: float = param("What the temperature of the first token is above 1", neutral=0.0, low=0.0)
    rate: float = param("Part of it that is left after each token", default=0.9, low=0.0, high=1.0, name="fading_rate")
    step: int = param("Tokens so far", default=0, low=0, public=False)  # the state: it is not a field of requests

    def apply(self, x: Any, row: RowStats) -> Any:
        return (x - row.top) / (1 + self.extra * self.rate**self.step)

    def update(self, token: SampledToken) -> Self:
        """The stage of the next step. nucleate keeps it with the sequence, also when that is preempted or forked."""
        return dataclasses.replace(self, step=self.step + 1)

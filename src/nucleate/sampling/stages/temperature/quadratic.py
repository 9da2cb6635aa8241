"""Quadratic sampling, or smooth sampling (kalomaze, https://github.com/oobabooga/text-generation-webui/pull/5403)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.stage import RowStats, Scale, param


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

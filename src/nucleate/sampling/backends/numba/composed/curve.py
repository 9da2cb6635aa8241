"""The scores of a row after its Scales, as a polynomial: for sums over the row.

The scores that a decision compares, and bounds of them, are computed by the rules themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nucleate.sampling.stage import RowStats

HALVINGS = 140
PROBE = np.concatenate(([0.0], -(2.0 ** np.arange(-HALVINGS, HALVINGS + 1))))
"""Relative scores, at which the scale of a rule is found."""
FITTED = np.array([-1.0, -2.0, -3.0, -0.25, -5.0, -64.0])
"""Relative scores in units of that scale: at the first three a cubic is fitted, at the others it is checked."""
TOLERANCE = 1e-11
"""Relative error of a curve, at most."""
SMALLEST = 1e-13
"""Smaller factors, for the scale of the rule, are rounding errors, or matter only to tokens without a weight."""


class Curve(NamedTuple):
    """``slope * z + second * z**2 + third * z**3`` of z = raw score - maximum: rises to 0 at z = 0."""

    slope: float = 1.0
    second: float = 0.0
    third: float = 0.0

    @property
    def bent(self) -> bool:
        """Whether it is not a line."""
        return self.second != 0.0 or self.third != 0.0

    def at(self, z: Any) -> Any:
        """The relative score of relative raw scores. Those at -inf may be NaN."""
        return ((self.third * z + self.second) * z + self.slope) * z if self.bent else z * self.slope

    def times(self, factor: float) -> Curve:
        """The curve after a linear Scale."""
        return Curve(self.slope * factor, self.second * factor, self.third * factor)

    def after(self, slope: float) -> Curve:
        """This curve of ``slope * z``."""
        return Curve(self.slope * slope, self.second * slope**2, self.third * slope**3)

    def shifted(self, z: float) -> Curve:
        """The curve relative to another maximum, which is at z."""
        slope = self.slope + (2.0 * self.second + 3.0 * self.third * z) * z
        return Curve(slope, self.second + 3.0 * self.third * z, self.third)


def fitted(rule: Callable[[Any, RowStats], Any], row: RowStats) -> Curve | None:
    """The cubic through the scores that a monotone rule returns; None if there is none, or if it is too steep."""
    fall_N = -np.asarray(rule(PROBE, row), np.float64)
    place = int((fall_N >= 1.0).argmax())
    if fall_N[0] != 0.0 or not 1.0 <= fall_N[place] < 1e3:
        return None
    unit = -float(PROBE[place])
    expected = np.asarray(rule(unit * FITTED, row))
    one, two, three = expected[:3].tolist()
    factors = (
        -3.0 * one + 1.5 * two - three / 3.0,
        -2.5 * one + 2.0 * two - 0.5 * three,
        -0.5 * one + 0.5 * two - three / 6.0,
    )
    curve = Curve(*(0.0 if abs(factor) < SMALLEST else factor for factor in factors))
    if not (curve.slope >= 0.0 >= curve.second and curve.third >= 0.0):  # it might rise again, far away
        return None
    if not (np.abs(curve.at(FITTED) - expected) <= TOLERANCE * (np.abs(expected) + 1.0)).all():
        return None
    return curve.after(1.0 / unit)

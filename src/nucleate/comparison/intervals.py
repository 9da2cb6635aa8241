"""Means with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


class Estimate(NamedTuple):
    """A mean, and the bounds of its 95 % interval; NaN if unknown."""

    mean: float
    low: float
    high: float


def estimate(groups: Sequence[Sequence[float]]) -> Estimate:
    """The mean over prompts of the mean of each, with a percentile bootstrap over prompts.

    groups: the values of each prompt; a metric of all outputs together has one. NaN values are left out. With a single
    prompt, the bootstrap is over its values.
    """
    known = [[value for value in group if value == value] for group in groups]  # noqa: PLR0124  # not NaN
    means = [float(np.mean(group)) for group in known if group]
    if not means:
        return Estimate(np.nan, np.nan, np.nan)
    mean, units = float(np.mean(means)), means if len(means) > 1 else next(filter(None, known))
    if len(units) < 2:
        return Estimate(mean, np.nan, np.nan)
    index_BU = np.random.default_rng(0).integers(0, len(units), (RESAMPLES, len(units)))  # the same for all settings
    means_B = np.asarray(units)[index_BU].mean(axis=1)
    low, high = np.quantile(means_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high))

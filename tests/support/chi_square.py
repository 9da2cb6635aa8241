"""Chi-square tests at alpha 1e-6: whether counts follow probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np


def critical_value(degrees: float) -> float:
    """The chi-square value that is exceeded once in a million (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.7534 * part**0.5) ** 3


def assert_follows(counts: Any, p: Any) -> None:
    """Compare counts with probabilities. Bins with fewer than 8 expected are merged; the impossible does not occur."""
    assert counts[p <= 0].sum() == 0, "impossible"
    expected = p * counts.sum()
    rare = expected < 8
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 1:
        assert counts[-1] < 18, "too often"
        counts, expected = counts[:-1], expected[:-1]
    if len(counts) > 1:
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert statistic < critical_value(len(counts) - 1), f"chi-square {statistic:.0f}"

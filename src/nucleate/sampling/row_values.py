"""Adds the values of vocabulary-wide Shifts to logits, before a backend runs the other stages."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.history import HistoryView
from nucleate.sampling.stage import Shift


def checked_values(stage: Shift, values: Any, size: int) -> NDArray[Any]:
    """The values of a Shift: float32 or float64 [size] or []. Raises ValueError for another shape."""
    array: NDArray[Any] = np.asarray(values)
    if array.shape not in ((), (size,)):
        raise ValueError(f"{stage.name}.values must return {size} values or one number, got {list(array.shape)}")
    return array if array.dtype == np.float32 else array.astype(np.float64)


def add_values(logits_V: NDArray[np.float32], stage: Shift, past: HistoryView, out_V: NDArray[np.float32]) -> None:
    """Add the values of a Shift to a row, rounded to float32. For float32 values, float64 would give the same."""
    value_V = checked_values(stage, past.values(stage, len(logits_V)), len(logits_V))
    with np.errstate(all="ignore"):  # the backend reports NaN and infinity
        np.add(logits_V, value_V, out=out_V, dtype=value_V.dtype, casting="same_kind")

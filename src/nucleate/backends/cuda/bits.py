"""Floats in columns of int64, so that all of a row is one copy: their bits. Knows no meaning of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def signed(words: Any) -> NDArray[np.int64]:
    """Integers in 0..2**64 - 1 as int64 of the same bits."""
    return np.asarray(words, np.uint64).view(np.int64)


def as_bits(numbers: Sequence[float], floats: torch.dtype) -> NDArray[np.int64]:
    """Floats as the integers of their bits."""
    column = np.asarray(numbers, np.float64)
    if floats == torch.float64:
        return column.view(np.int64)
    with np.errstate(over="ignore"):
        return column.astype(np.float32).view(np.int32).astype(np.int64)


def as_floats(bits: torch.Tensor, floats: torch.dtype) -> torch.Tensor:
    """The inverse, on the device."""
    return bits.view(floats) if floats == torch.float64 else bits.to(torch.int32).view(floats)

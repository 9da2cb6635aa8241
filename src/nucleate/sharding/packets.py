"""Packs tensors of known shapes into one payload of bytes, and unpacks the payloads of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Field = tuple[Any, tuple[int, ...]]
"""The NumPy data type and the shape of a tensor."""


def pack(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The bytes of tensors, uint8 [N], on a device."""
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat([part.to(device) for part in parts]) if parts else torch.zeros(0, dtype=torch.uint8, device=device)


def unpack(received: torch.Tensor, fields: Sequence[Field]) -> list[NDArray[Any]]:
    """The arrays [ranks, *shape] of payloads uint8 [ranks, N]."""
    data, at, arrays = received.cpu().numpy(), 0, []
    for dtype, shape in fields:
        end = at + prod(shape) * np.dtype(dtype).itemsize
        arrays.append(np.ascontiguousarray(data[:, at:end]).view(dtype).reshape(len(data), *shape))
        at = end
    return arrays


def padded(x: torch.Tensor, size: int, value: float) -> torch.Tensor:
    """A tensor [R, N] with N increased to ``size``."""
    return x if x.shape[1] == size else torch.nn.functional.pad(x, (0, size - x.shape[1]), value=value)

"""NumPy results as tensors, for callers that gave tensors."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from nucleate.backends.cuda.device import floats_of


def on_device_of(logits: torch.Tensor, result: NDArray[Any]) -> torch.Tensor:
    """An array as a tensor on the device of some logits; float32 where the device has no float64."""
    tensor = torch.from_numpy(result)
    if logits.is_cpu:
        return tensor
    return tensor.to(logits.device, floats_of(logits.device) if tensor.is_floating_point() else tensor.dtype)

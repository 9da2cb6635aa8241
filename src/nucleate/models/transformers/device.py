"""Checks a device before a model is loaded: its name, and whether torch finds it."""

from __future__ import annotations

import re

from nucleate.models.transformers.transformers_model import import_torch
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError

ALLOWED = "auto, cpu, cuda, cuda:N, xpu, xpu:N or mps"
_ACCELERATOR = re.compile(r"(cuda|xpu|mps)(?::([0-9]{1,3}))?")


def check_device(device: str) -> None:
    """Raise ParameterError for an unknown device name, or one that torch does not find.

    Imports torch only for an accelerator; raises ModelError if it is not installed.
    """
    if device in ("auto", "cpu"):
        return
    match = _ACCELERATOR.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise ParameterError("device", f"device must be {ALLOWED}, got {shown(device)}")
    torch, kind = import_torch(), match[1]
    count = getattr(torch, kind).device_count()
    if int(match[2] or 0) < count:
        return
    if kind == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        reason = f"torch {torch.__version__} is built without CUDA"
    else:
        reason = f"torch finds {count or 'no'} {kind} device{'s' * (count != 1)}"
    raise ParameterError("device", f"device {device!r} is not available: {reason}; allowed: {ALLOWED}")

"""Devices: which kernels they can run, data types, transfers and CUDA graphs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.parameters.parameter import ParameterError


def opened(name: Any) -> torch.device:
    """The device of a name, with its number. Raises ParameterError where torch has none."""
    try:
        device: torch.device = torch.empty(0, device=torch.device(name)).device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        why = " ".join(str(error).split())[:200]
        raise ParameterError("device", f"device must be one that torch has here, got {name!r:.60}: {why}") from error
    if device.type == "meta":
        raise ParameterError("device", f"device must be one that holds numbers, got {name!r:.60}")
    return device


def kernels_on(device: torch.device, backend: str) -> str:
    """What runs the chain there: "triton" or "torch". Raises ParameterError where it cannot."""
    if backend == "torch":
        return backend
    there = importlib.util.find_spec("triton") is not None
    if backend == "auto":  # on ROCm, too, a device is called "cuda"; the kernels were made for warps of 32
        return "triton" if there and device.type == "cuda" and torch.version.hip is None else "torch"
    if not there:
        raise ParameterError("backend", "backend 'triton' needs Triton: pip install triton (Linux only)")
    if device.type != "cuda" and not interpreted():
        raise ParameterError("backend", f"backend 'triton' needs a CUDA device, got {str(device)!r}")
    return "triton"


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def floats_of(device: torch.device) -> torch.dtype:
    """What is computed with: float64, but on devices that have none."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def guard(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels go to the current device: while this is entered, that is the one given."""
    entered: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    return entered


def sent(values: Any, device: torch.device) -> torch.Tensor:
    """Integers on a device, tensors and arrays as they are, lists as int64.

    The host does not wait where CUDA has taken over what is sent when the call returns, as it does of pageable memory.
    """
    tensor = torch.as_tensor(values, dtype=torch.int64) if isinstance(values, list) else torch.as_tensor(values)
    return tensor.to(device, non_blocking=device.type == "cuda")


def packed(values: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """An array on a device in one copy, for which the host does not wait.

    On CUDA by way of memory that stays where it is, which torch keeps for the next one and does not write to before the
    copy is done.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return sent(tensor, device)


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """What a function does on the current CUDA device, as a graph: call it to do so again. It is run once before.

    What it reads and writes must stay where it is.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


def on_device_of(logits: torch.Tensor, result: NDArray[Any]) -> torch.Tensor:
    """An array as a tensor on the device of some logits; float32 where the device has no float64."""
    tensor = torch.from_numpy(result)
    if logits.is_cpu:
        return tensor
    return tensor.to(logits.device, floats_of(logits.device) if tensor.is_floating_point() else tensor.dtype)

"""Devices: which kernels they can run, data types, transfers and CUDA graphs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.parameters.parameter import ParameterError


def open_device(name: Any) -> torch.device:
    """The torch device of a name, with its index. Raises ParameterError if it is not available."""
    try:
        device: torch.device = torch.empty(0, device=torch.device(name)).device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        why = " ".join(str(error).split())[:200]
        raise ParameterError(
            "device", f"device must be one that torch supports here, got {name!r:.60}: {why}"
        ) from error
    if device.type == "meta":
        raise ParameterError("device", f"device must store data, got {name!r:.60}")
    return device


def select_kernels(device: torch.device, backend: str) -> str:
    """The backend of the fused pipeline, "triton" or "torch". Raises ParameterError if the device lacks support."""
    if backend == "torch":
        return backend
    there = importlib.util.find_spec("triton") is not None
    if backend == "auto":  # ROCm devices are also named "cuda", but the kernels assume warps of 32
        return "triton" if there and device.type == "cuda" and torch.version.hip is None else "torch"
    if not there:
        raise ParameterError("backend", "backend 'triton' needs Triton: pip install triton (Linux only)")
    if device.type != "cuda" and not triton_interpreted():
        raise ParameterError("backend", f"backend 'triton' needs a CUDA device, got {str(device)!r}")
    if triton_interpreted() and _minor_version("triton") < (3, 7) and _minor_version("numpy") >= (2, 4):
        raise ParameterError("backend", "Triton's interpreter needs Triton 3.7 or newer, or a NumPy older than 2.4")
    return "triton"


def _minor_version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.import_module(package).__version__.split(".")[:2])


def triton_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter (TRITON_INTERPRET), on any device."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def float_dtype(device: torch.device) -> torch.dtype:
    """The dtype of computations: float64, or float32 on devices without float64."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager that makes this the current CUDA device, on which Triton launches kernels."""
    entered: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    return entered


def to_device(values: Any, device: torch.device) -> torch.Tensor:
    """Copy a tensor, an array or a list of integers (as int64) to a device, without synchronising.

    CUDA has staged a copy from pageable memory when the call returns, so the source may be reused.
    """
    tensor = torch.as_tensor(values, dtype=torch.int64) if isinstance(values, list) else torch.as_tensor(values)
    return tensor.to(device, non_blocking=device.type == "cuda")


def to_device_pinned(values: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copy an array to a device asynchronously. On CUDA through pinned memory, which torch reuses after the copy."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return to_device(tensor, device)


def capture_graph(run: Callable[[], None]) -> Callable[[], None]:
    """Run a function once, capture it in a CUDA graph, and return a function that replays the graph.

    The tensors that it reads and writes must keep their addresses.
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


def to_device_of(logits: torch.Tensor, result: NDArray[Any]) -> torch.Tensor:
    """Copy an array to the device of the logits; as float32 if the device has no float64."""
    tensor = torch.from_numpy(result)
    if logits.is_cpu:
        return tensor
    return tensor.to(logits.device, float_dtype(logits.device) if tensor.is_floating_point() else tensor.dtype)

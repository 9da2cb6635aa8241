"""Selects the code path of a row by its pipeline, the size of the call, the device, the backend and loaded kernels."""

from __future__ import annotations

import importlib.util
import re
from typing import NamedTuple

from nucleate.jit.kernel_libraries import fallback_reason
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.dispatch.device_row import DeviceRowSpec, device_row_spec
from nucleate.sampling.dispatch.fused_pipeline import FusedPipeline
from nucleate.sampling.stage import Pipeline

DEVICES = re.compile(r"(cuda|mps|xpu)(:\d+)?")
TENSOR_BACKENDS = ("torch", "triton")
"""Backends that run rows on a device."""

FUSED, COMPOSED, REFERENCE = "fused kernel", "composed stages", "reference"
"""The code paths: the fused kernel for common pipelines, composed stages for any pipeline, the reference."""


class Route(NamedTuple):
    """The code path of a row, with the reason."""

    backend: str  #: "reference", "cpu", "torch" or "triton"
    path: str  #: "fused kernel", "composed stages" or "reference"
    why: str  #: why no faster path applies; "" for the fastest
    row_spec: DeviceRowSpec | None = None  #: the specification of the row, if a device runs it


def dispatch(
    stages: Pipeline,
    fused: FusedPipeline | str,
    vocab_size: int | None,
    rows: int = 1,
    *,
    device: str = "cpu",
    backend: str = "auto",
) -> Route:
    """The code path of a row in a call with ``rows`` rows. It may change later, when kernels have been loaded.

    stages: simplified. fused: the result of ``to_fused_pipeline``. vocab_size: V; None stands for a large one. Raises
    ParameterError for an unknown backend.
    """
    if device == "cpu" and backend not in TENSOR_BACKENDS:
        return _cpu_route(fused, vocab_size, rows, backend)
    uses_device = backend in ("auto", *TENSOR_BACKENDS)
    row = device_row_spec(stages, vocab_size) if uses_device else f"the backend is {backend!r}"
    if isinstance(row, str):  # the CPU samples such rows one by one
        return _cpu_route(row, vocab_size, 1, "auto" if uses_device else backend)._replace(
            why=f"on the CPU, because {row}"
        )
    if row.signature is not None:
        return Route("torch", COMPOSED, str(fused), row)
    if (backend if backend in TENSOR_BACKENDS else tensor_backend(device)) == "triton":
        return Route("triton", FUSED, "", row)
    why = f"{device} has no Triton" if backend == "auto" else f"the backend is {backend!r}"
    return Route("torch", COMPOSED, why, row)


def _cpu_route(fused: FusedPipeline | str, vocab_size: int | None, rows: int, backend: str) -> Route:
    """The code path of a row on the CPU."""
    why = fallback_reason(backend, rows * (vocab_size or 1))
    if why:
        return Route("reference", REFERENCE, why)
    return Route("cpu", COMPOSED, fused) if isinstance(fused, str) else Route("cpu", FUSED, "")


def check_device(device: str) -> None:
    """Raise ParameterError for an invalid device name."""
    if not isinstance(device, str) or not (device == "cpu" or DEVICES.fullmatch(device)):
        known = "'cpu', 'cuda', 'mps' or 'xpu', one of several as 'cuda:1'"
        raise ParameterError("device", f"device must be {known}, got {device!r:.60}")


def tensor_backend(device: str) -> str:
    """The backend that "auto" selects on a device: "triton" or "torch"."""
    return "triton" if device.startswith("cuda") and importlib.util.find_spec("triton") is not None else "torch"

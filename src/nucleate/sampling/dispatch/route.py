"""Selects the code path of a row by its pipeline, the size of the call, the device, the backend and loaded kernels."""

from __future__ import annotations

import importlib.util
import re
from typing import NamedTuple

from nucleate.jit.readiness import fallback_reason
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.dispatch.device_row import DeviceRowSpec, device_row
from nucleate.sampling.dispatch.fused_pipeline import FusedPipeline
from nucleate.sampling.stage import Pipeline

DEVICES = re.compile(r"(cuda|mps|xpu)(:\d+)?")
TENSOR_BACKENDS = ("torch", "triton")
"""Backends that run rows on a device."""

HOT, GENERIC, REFERENCE = "fused kernel", "composed stages", "reference"
"""The code paths: the fused kernel for common pipelines, composed stages for any pipeline, the reference."""


class Route(NamedTuple):
    """The code path of a row, with the reason."""

    backend: str  #: "reference", "cpu", "torch" or "triton"
    path: str  #: "fused kernel", "composed stages" or "reference"
    why: str  #: why no faster path applies; "" for the fastest
    resident: DeviceRowSpec | None = None  #: the specification of the row, if a device runs it


def dispatch(
    stages: Pipeline,
    chain: FusedPipeline | str,
    vocab_size: int | None,
    rows: int = 1,
    *,
    device: str = "cpu",
    backend: str = "auto",
) -> Route:
    """The code path of a row in a call of some rows, as of now: kernels may be loaded later.

    stages: simplified. chain: as ``chain_of`` says. vocab_size: V; None stands for a large one. Raises ParameterError
    for a backend that does not exist.
    """
    if device == "cpu" and backend not in TENSOR_BACKENDS:
        return _on_host(chain, vocab_size, rows, backend)
    there = backend in ("auto", *TENSOR_BACKENDS)
    row = device_row(stages, vocab_size) if there else f"the backend is {backend!r}"
    if isinstance(row, str):  # the host draws such rows one by one, each through the composed path
        return _on_host(row, vocab_size, 1, "auto" if there else backend)._replace(why=f"on the host, because {row}")
    if row.staged is not None:
        return Route("torch", GENERIC, str(chain), row)
    if (backend if backend in TENSOR_BACKENDS else tensor_backend(device)) == "triton":
        return Route("triton", HOT, "", row)
    why = f"{device} has no Triton" if backend == "auto" else f"the backend is {backend!r}"
    return Route("torch", GENERIC, why, row)


def _on_host(chain: FusedPipeline | str, vocab_size: int | None, rows: int, backend: str) -> Route:
    """The same for the CPU."""
    why = fallback_reason(backend, rows * (vocab_size or 1))
    if why:
        return Route("reference", REFERENCE, why)
    return Route("cpu", GENERIC, chain) if isinstance(chain, str) else Route("cpu", HOT, "")


def check_device(device: str) -> None:
    """Raise ParameterError for an invalid device name."""
    if not isinstance(device, str) or not (device == "cpu" or DEVICES.fullmatch(device)):
        known = "'cpu', 'cuda', 'mps' or 'xpu', one of several as 'cuda:1'"
        raise ParameterError("device", f"device must be {known}, got {device!r:.60}")


def tensor_backend(device: str) -> str:
    """The backend that "auto" selects on a device: "triton" or "torch"."""
    return "triton" if device.startswith("cuda") and importlib.util.find_spec("triton") is not None else "torch"

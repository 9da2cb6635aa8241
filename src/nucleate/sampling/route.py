"""Selects the code path of a row, and explains which one samples a pipeline.

The path depends on the pipeline, the size of the call, the device, the backend and loaded kernels.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import NamedTuple

from nucleate.jit.kernel_libraries import fallback_reason
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.inputs import check_count, check_ids
from nucleate.sampling.pipeline import FusedPipeline, Params, prepared
from nucleate.sampling.signature import DeviceRowSpec, device_row_spec
from nucleate.sampling.stage import Combine, Pipeline, shape_of

DEVICES = re.compile(r"(cuda|mps|xpu)(:\d+)?")
TENSOR_BACKENDS = ("torch", "triton")
"""Backends that run rows on a device."""

FUSED, COMPOSED, REFERENCE = "fused kernel", "composed stages", "reference"
"""The code paths: the fused kernel for common pipelines, composed stages for any pipeline, the reference.

REFERENCE includes ``draw_with_numpy``, its shortcut for common pipelines in a ``Sampler`` whose kernels are not loaded.
"""


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


@dataclass(frozen=True)
class ExecutionPlan:
    """The pipeline as given and as simplified, and the code path that runs it, with the reason."""

    given: Pipeline
    stages: Pipeline
    backend: str  #: "reference", "cpu", "torch" or "triton"
    path: str  #: "fused kernel", "composed stages" or "reference"
    why: str  #: why no faster path applies; "" for the fastest

    def __str__(self) -> str:
        where = self.backend if self.backend == self.path else f"{self.backend} backend, {self.path}"
        lines, left = [f"{where}: {self.why}" if self.why else where], list(self.stages)
        for stage in self.given:
            if isinstance(stage, Combine) and not stage.neutral:
                lines.append(f"  {shape_of(stage).lower():7} {stage!r}  (before the backend)")
                continue
            stays = left[:1] == [stage]
            note = "" if stays else "  (removed: it cannot change the result)"
            lines.append(f"  {shape_of(stage).lower():7} {stage!r}{note}")
            left = left[stays:]
        return "\n".join([*lines, *(f"  {shape_of(stage).lower():7} {stage!r}" for stage in left)])


@with_suggestions
def explain(
    params: Params, device: str = "cpu", *, vocab_size: int | None = None, rows: int = 1, backend: str = "auto"
) -> ExecutionPlan:
    """The code path that a ``Sampler`` would use for these parameters now. Print it, or read its fields.

    device: "cpu", "cuda", "cuda:1", "mps", "xpu"; it need not be available. vocab_size, rows: of the call; without
    vocab_size they are assumed to be large. backend: as in ``sample`` and ``Sampler``. With backend "auto" the result
    can change once kernels are loaded, see ``warm``. Raises ParameterError for invalid arguments.
    """
    check_device(device)
    for name, count in (("vocab_size", vocab_size), ("rows", rows)):
        if count is not None:
            check_count(count, name)
    one = prepared(params)
    if vocab_size is not None:
        check_ids(one.stages, vocab_size)
    route = dispatch(one.stages, one.fused, vocab_size, rows, device=device, backend=backend)
    return ExecutionPlan(one.given, one.stages, route.backend, route.path, route.why)

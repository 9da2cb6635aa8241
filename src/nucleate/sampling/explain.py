"""Explains which code path samples a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from nucleate.parameters.keywords import with_suggestions
from nucleate.sampling.dispatch.route import check_device, dispatch
from nucleate.sampling.inputs import check_count, check_ids
from nucleate.sampling.pipeline import Params, prepared
from nucleate.sampling.stage import Combine, Pipeline, shape_of


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

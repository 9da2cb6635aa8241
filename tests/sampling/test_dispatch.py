"""Dispatch reports the path that runs, without importing a compiler or a tensor library."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.jit import kernel_libraries
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import functional, host_batch
from nucleate.sampling.stage import Pipeline
from nucleate.sampling.stages import (
    Dry,
    Frequency,
    Gumbel,
    LogitBias,
    MinP,
    Mirostat,
    Repetition,
    TopK,
    TopP,
    Typical,
    Xtc,
)

FUSED: list[Pipeline] = [
    (TopK(20), TopP(0.9), Gumbel(1)),
    (Repetition(1.2), LogitBias({3: 1.0}), MinP(0.05), Gumbel(2)),
    (Gumbel(3),),
]
OTHERS: list[Pipeline] = [(Typical(0.9), Gumbel(1)), (Mirostat(5), Gumbel(2)), (Frequency(0.5), Xtc(0.5), Gumbel(3))]


@pytest.mark.slow
def test_explaining_a_device_imports_neither_compiler_nor_tensors() -> None:
    code = """
import sys
import nucleate as nc
from nucleate.sampling.stages import AdaptiveP, Dry, Gumbel, Mirostat, Repetition, TopK, Typical, Xtc
for stages in (
    (TopK(20), Gumbel(1)),
    (Repetition(1.2), Dry(0.8), Typical(0.9), Gumbel(1)),
    (Mirostat(5), Xtc(0.5), AdaptiveP(0.5)),
    (TopK(5), Repetition(1.2)),
):
    for device in ("cuda", "cuda:1", "mps", "cpu"):
        for size in (None, 100, 128256):
            print(nc.explain(stages, device, vocab_size=size, rows=4))
print(nc.explain(nc.SamplingParams(top_p=0.9, dry_multiplier=0.8), device="cuda", backend="torch"))
print({"numba", "llvmlite", "torch", "triton"} & sys.modules.keys(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """The paths that rows take, by their names in ``explain``."""
    paths: set[tuple[str, str]] = set()
    row_path, thread_runner = host_batch.row_path, host_batch.thread_runner

    def watched_row_path(fast: bool) -> Any:
        paths.add(("cpu", "composed stages") if fast else ("reference", "reference"))
        return row_path(fast)

    def watched_runner(size: int) -> Any:
        paths.add(("cpu", "fused kernel"))
        return thread_runner(size)

    draw_with_numpy = host_batch.draw_with_numpy

    def watched_numpy(*given: Any) -> int:
        paths.add(("reference", "reference"))  # its shortcut
        return draw_with_numpy(*given)

    monkeypatch.setattr(host_batch, "draw_with_numpy", watched_numpy)
    for module in (host_batch, functional):
        monkeypatch.setattr(module, "row_path", watched_row_path)
        monkeypatch.setattr(module, "thread_runner", watched_runner)
    return paths


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize(("size", "rows"), [(50, 1), (4096, 1), (4096, 2), (9000, 1)])
def test_explain_reports_the_path_that_runs(
    ran: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, size: int, rows: int, backend: str, loaded: bool
) -> None:
    monkeypatch.setattr(kernel_libraries.KERNELS, "ready", loaded)
    logits = np.random.default_rng(size).normal(size=(rows, size)).astype(np.float32)
    for stages in (*FUSED, *OTHERS):
        plan = nc.explain(stages, vocab_size=size, rows=rows, backend=backend)
        for draw in (_sample, _step):
            ran.clear()
            draw(logits, stages, backend)
            assert ran == {(plan.backend, plan.path)}, stages


def _sample(logits: np.ndarray, stages: Pipeline, backend: str) -> None:
    nc.sample(logits, stages, backend=backend)


def _step(logits: np.ndarray, stages: Pipeline, backend: str) -> None:
    sampler = nc.Sampler(logits.shape[1], backend)
    for _ in logits:
        sampler.add(stages)
    sampler(logits)


def test_explain_reports_whether_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    params = nc.SamplingParams(top_p=0.9, seed=1)
    early = nc.explain(params, vocab_size=128256)
    assert (early.backend, early.path) == ("reference", "reference")
    assert str(early).splitlines()[0] == "reference: the kernels are not loaded yet"
    monkeypatch.setattr(kernel_libraries.KERNELS, "ready", True)
    assert str(nc.explain(params, vocab_size=128256)).splitlines()[0] == "cpu backend, fused kernel"
    assert nc.explain(params, vocab_size=10, backend="cpu").path == "fused kernel"
    assert nc.explain(params, vocab_size=10**6, backend="reference").why == "the backend is 'reference'"


def test_explain_reports_the_vocabulary_size_and_the_backend_of_a_device() -> None:
    stages = (Dry(0.8), LogitBias({70: 1.0}), TopK(5), Gumbel(1))
    assert nc.explain(stages, "mps", vocab_size=100).backend == "torch"
    with pytest.raises(ParameterError, match="logit_bias names token 70, but the vocabulary ends at 49"):
        nc.explain(stages, "mps", vocab_size=50)
    plan = nc.explain(stages, "mps", vocab_size=100_000, backend="reference")
    assert (plan.backend, plan.why) == ("reference", "on the CPU, because the backend is 'reference'")
    assert nc.explain(stages, "cpu", backend="torch").why == "the backend is 'torch'"
    for wrong in ("cuda", "numpy", None):
        with pytest.raises(ParameterError, match="backend must be one of"):
            nc.explain(stages, backend=wrong)  # type: ignore[arg-type]
    for size, rows in ((0, 1), (-5, 1), (2.5, 1), (True, 1), (100, 0), (100, "1")):
        with pytest.raises(ParameterError, match="must be an integer >= 1"):
            nc.explain(stages, vocab_size=size, rows=rows)  # type: ignore[arg-type]

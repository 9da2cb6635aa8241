"""The kernels of the program: which modules have them, and which are compiled together. Knows modules by name only."""

from __future__ import annotations

from pathlib import Path

from nucleate.jit.native_library import KernelLibrary

_ROOT = Path(__file__).parents[1]


def _sources(*names: str) -> list[Path]:
    found = (path for name in names for path in _ROOT.glob(name))
    return sorted(found)


_NUMBA = "sampling/backends/numba/**/*.py"
CHAIN = KernelLibrary(
    "chain",
    ("nucleate.sampling.backends.numba.fused.kernel",),
    _sources(_NUMBA, "sampling/dispatch/fused_pipeline.py", "sampling/maths.py", "sampling/noise.py"),
)
GENERIC = KernelLibrary(
    "generic",
    ("nucleate.sampling.backends.numba.composed.row_kernels", "nucleate.sampling.backends.numba.row_loading"),
    _sources(_NUMBA, "sampling/maths.py", "sampling/noise.py"),
)
MODELS = KernelLibrary(
    "models",
    ("nucleate.models.kernels.elementwise", "nucleate.models.kernels.attention_kernel"),
    _sources("models/kernels/*.py", "models/paged/kv_pool.py", "models/paged/tree_mask.py"),
)
DRAFTS = KernelLibrary(
    "drafts",
    ("nucleate.speculative.proposers.neural.draft_kernels",),
    _sources("speculative/proposers/neural/draft_kernels.py", "sampling/backends/numba/*.py", "sampling/noise.py"),
)

SAMPLER = (CHAIN, GENERIC)
"""What backend "cpu" draws with."""
ALL = (*SAMPLER, MODELS, DRAFTS)

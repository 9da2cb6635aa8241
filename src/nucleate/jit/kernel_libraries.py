"""All kernel libraries: which modules declare their kernels, and which sources they depend on. Imports no kernel."""

from __future__ import annotations

from pathlib import Path

from nucleate.jit.native_library import KernelLibrary

_ROOT = Path(__file__).parents[1]


def _sources(*names: str) -> list[Path]:
    return sorted(path for name in names for path in _ROOT.glob(name))


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
    ("nucleate.models.kernels",),
    _sources("models/kernels.py", "models/paged_cache.py"),
)
_LOOKUP = ("suffix_kernels", "suffix_draft_kernels", "suffix_tree_kernels", "ngram_kernels")
DRAFTS = KernelLibrary(
    "drafts",
    (
        "nucleate.speculative.proposers.neural.draft_kernels",
        *(f"nucleate.speculative.proposers.{name}" for name in _LOOKUP),
    ),
    _sources(
        "speculative/proposers/neural/draft_kernels.py",
        "sampling/backends/numba/*.py",
        "sampling/noise.py",
        *(f"speculative/proposers/{name}.py" for name in (*_LOOKUP, "counting_automaton")),
        "speculative/draft.py",
        "sampling/suffix_automaton.py",
    ),
)

SAMPLER = (CHAIN, GENERIC)
"""The libraries of backend "cpu"."""
ALL = (*SAMPLER, MODELS, DRAFTS)

"""All kernel libraries: their modules and sources, how to load them, and whether a call uses them. Imports no kernel.

With backend "auto", no call waits for kernels: until they are loaded, the reference computes the same tokens, and its
time counts towards loading or compiling them in the background (``KernelLibrary.record_fallback``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from nucleate.jit.native_library import KernelLibrary, ProgressCallback, ensure_loaded, load_in_background
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError

_ROOT = Path(__file__).parents[1]


def _sources(*names: str) -> list[Path]:
    return sorted(path for name in names for path in _ROOT.glob(name))


_CPU = "sampling/cpu/*.py"
FUSED = KernelLibrary(
    "fused",
    ("nucleate.sampling.cpu.fused_kernel",),
    _sources(_CPU, "sampling/pipeline.py", "sampling/maths.py", "sampling/noise.py"),
)
COMPOSED = KernelLibrary(
    "composed", ("nucleate.sampling.cpu.row_kernels",), _sources(_CPU, "sampling/maths.py", "sampling/noise.py")
)
MODELS = KernelLibrary("models", ("nucleate.models.kernels",), _sources("models/kernels.py", "models/paged_cache.py"))
DRAFTS = KernelLibrary(
    "drafts",
    ("nucleate.speculative.neural.draft_kernels", "nucleate.speculative.lookup_kernels"),
    _sources(
        "speculative/neural/draft_kernels.py",
        "sampling/cpu/kernel_maths.py",
        "sampling/noise.py",
        "speculative/lookup_kernels.py",
        "speculative/suffix.py",
        "speculative/draft.py",
        "sampling/suffix_automaton.py",
    ),
)


SAMPLER = (FUSED, COMPOSED)
"""The libraries of backend "cpu"."""
ALL = (*SAMPLER, MODELS, DRAFTS)


@with_suggestions
def warm(
    *, background: bool = False, on_progress: ProgressCallback | None = None, also: Callable[[], object] | None = None
) -> threading.Thread | None:
    """Load all CPU kernels, and compile those that are not cached, in parallel on all cores.

    background: do it in a thread, which is returned, at a low priority. Until it ends, backend "auto" uses the
    reference: the same tokens, more slowly, but no call waits. on_progress: called with a line about each kernel.
    also: called when all kernels are loaded, such as ``Runner.warm``. Raises KernelError if a kernel cannot be
    compiled; in the background, the error is logged.
    """
    if background:
        return load_in_background(ALL, on_progress=on_progress, also=also)
    ensure_loaded(ALL, on_progress)
    if also is not None:
        also()
    return None


BACKENDS = ("auto", "reference", "cpu")
SECONDS_PER_LOGIT = 1e-7
"""A lower bound of the time that the reference takes per logit."""


class KernelReadiness:
    """Whether the kernels of some libraries are loaded in this process."""

    def __init__(self, libraries: Sequence[KernelLibrary]) -> None:
        self.libraries = tuple(libraries)
        self._ready = False

    @property
    def ready(self) -> bool:
        """Whether all libraries are loaded."""
        if not self._ready:
            self._ready = all(library.ready for library in self.libraries)
        return self._ready

    def record_fallback(self, logits: int) -> None:
        """Count a call of the reference with this number of logits."""
        for library in self.libraries:
            library.record_fallback(logits * SECONDS_PER_LOGIT)


KERNELS = KernelReadiness(SAMPLER)


def compiled(backend: str, logits: int) -> bool:
    """Whether a call with this number of logits uses compiled kernels where it can. Raises ParameterError."""
    if backend == "auto":
        if KERNELS.ready:
            return True
        KERNELS.record_fallback(logits)
        return False
    if backend not in BACKENDS:
        raise ParameterError("backend", f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend == "cpu"


def fallback_reason(backend: str, logits: int) -> str:
    """Why such a call would use the reference now; "" if it would use compiled kernels. Raises ParameterError."""
    if backend == "auto":
        return "" if KERNELS.ready else "the kernels are not loaded yet"
    return "" if compiled(backend, logits) else f"the backend is {backend!r}"

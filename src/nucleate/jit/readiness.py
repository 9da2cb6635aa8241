"""Whether a call uses the compiled sampling kernels or the reference backend.

With backend "auto", no call waits for kernels: until they are loaded, the reference computes the same tokens, and its
time counts towards loading or compiling them in the background (``KernelLibrary.record_fallback``).
"""

from __future__ import annotations

from collections.abc import Sequence

from nucleate.jit.kernel_libraries import SAMPLER
from nucleate.jit.native_library import KernelLibrary
from nucleate.parameters.parameter import ParameterError

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

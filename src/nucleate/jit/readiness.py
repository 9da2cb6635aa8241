"""Whether a call runs through compiled kernels. Nothing waits for them, but who asks for backend "cpu".

While they are not in memory the reference answers, with the same tokens, and they are got in the background as soon as
that is worth it, see ``native_library``.
"""

from __future__ import annotations

from collections.abc import Sequence

from nucleate.jit.kernel_libraries import SAMPLER
from nucleate.jit.native_library import KernelLibrary
from nucleate.parameters.parameter import ParameterError

BACKENDS = ("auto", "reference", "cpu")
PACE = 1e-7
"""Seconds that the reference takes for a score, or more."""


class KernelReadiness:
    """What this process has of the kernels that draw tokens."""

    def __init__(self, libraries: Sequence[KernelLibrary]) -> None:
        self.libraries = tuple(libraries)
        self._ready = False

    @property
    def ready(self) -> bool:
        """All of them are in memory."""
        if not self._ready:
            self._ready = all(library.ready for library in self.libraries)
        return self._ready

    def missed(self, scores: int) -> None:
        """So many scores are to be drawn from without them."""
        for library in self.libraries:
            library.record_fallback(scores * PACE)


KERNELS = KernelReadiness(SAMPLER)


def compiled(backend: str, scores: int) -> bool:
    """Whether a call with so many scores runs what it can through compiled kernels. Raises ParameterError."""
    if backend == "auto":
        if KERNELS.ready:
            return True
        KERNELS.missed(scores)
        return False
    if backend not in BACKENDS:
        raise ParameterError("backend", f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend == "cpu"


def why_not(backend: str, scores: int) -> str:
    """Why the reference runs such a call, as of now; "" if compiled kernels do. Raises ParameterError."""
    if backend == "auto":
        return "" if KERNELS.ready else "the kernels are not loaded yet"
    return "" if compiled(backend, scores) else f"the backend is {backend!r}"

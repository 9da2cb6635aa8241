"""When the compiled CPU kernels of this process are used: not before they are loaded, or worth loading."""

from __future__ import annotations

import threading
from pathlib import Path

from nucleate.core.kept import Patience
from nucleate.core.parameter import ParameterError

BACKENDS = ("auto", "reference", "cpu")
WORTH_COMPILING = 1 << 13
"""Scores in a call; with fewer, "auto" does not load the compiler, unless ``warm`` has, or many calls were made."""
PATIENCE = 1 << 20, 5 << 24
"""Scores in small calls that take about as long as to load the kernels, a second, and as to compile them."""


def _folder() -> Path:
    from nucleate.backends.cpu.compile import folder  # it imports the compiler

    return folder()


class Kernels:
    """What this process knows of its compiled kernels, see ``warm``."""

    def __init__(self) -> None:
        self.warming: list[threading.Thread] = []  #: what compiles them in the background now
        self.warm = False  #: those that nearly all requests need are there
        self.patience = Patience(_folder, *PATIENCE)

    def missed(self, scores: int) -> None:
        """So many scores were drawn from without kernels."""
        self.warm = self.warm or (not self.warming and self.patience.ends(scores))


KERNELS = Kernels()


def compiled(backend: str, scores: int) -> bool:
    """Whether a call with so many scores runs what it can through compiled kernels. Raises ParameterError."""
    if backend == "auto":
        return (scores >= WORTH_COMPILING or KERNELS.warm) and not KERNELS.warming
    if backend not in BACKENDS:
        raise ParameterError("backend", f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend == "cpu"


def why_not(backend: str, scores: int) -> str:
    """Why the reference runs such a call, as of now; "" where ``compiled`` kernels do. Raises ParameterError."""
    if compiled(backend, scores):
        return ""
    if backend != "auto":
        return f"the backend is {backend!r}"
    if KERNELS.warming:
        return "the kernels are being loaded or compiled"
    return f"the kernels are not loaded yet, and {scores:,} scores in a call are fewer than {WORTH_COMPILING:,}"

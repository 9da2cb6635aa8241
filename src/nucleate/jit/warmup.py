"""warm: loads all CPU kernels, and compiles those that are not cached."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nucleate.jit.kernel_libraries import ALL
from nucleate.jit.native_library import ProgressCallback, ensure_loaded, load_in_background
from nucleate.parameters.keywords import with_suggestions


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

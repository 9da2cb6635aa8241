"""warm: have all kernels in memory, compiled now if they are not kept, so that none is missed later."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nucleate.jit.kernel_libraries import ALL
from nucleate.jit.native_library import ProgressCallback, begin, get


def warm(
    *, background: bool = False, on_progress: ProgressCallback | None = None, also: Callable[[], object] | None = None
) -> threading.Thread | None:
    """Get all CPU kernels: from disk, or compiled, on as many cores as there are.

    background: in a thread, which is returned; what must be compiled is, at a low priority. Until it ends, backend
    "auto" answers with the reference: the same tokens, slowly, but no call waits. on_progress: called with a line about
    each kernel. also: called when all are there, such as ``Runner.warm``. Raises KernelError if they cannot be
    compiled; in the background that is logged."""
    if background:
        return begin(ALL, on_progress=on_progress, also=also)
    get(ALL, on_progress)
    if also is not None:
        also()
    return None

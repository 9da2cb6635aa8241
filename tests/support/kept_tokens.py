"""What the compiled chain leaves of a row, told by its own functions: the tokens that are in, and those in doubt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray

from nucleate.jit.compiler import jit
from nucleate.sampling.backends.numba.fused.cutoffs import MANY, TIED, first, narrow
from nucleate.sampling.backends.numba.fused.logit_edits import take
from nucleate.sampling.backends.numba.fused.row_table import FLOAT32, room_for
from nucleate.sampling.backends.numba.fused.workspace import DOUBTED, address_of, carve
from nucleate.sampling.backends.numba.row_loading import floats_at
from nucleate.sampling.backends.numba.vector_lanes import GROUP
from nucleate.sampling.dispatch.fused_pipeline import FusedParams


@jit
def _left(address: Any, size: Any, chain: Any, room: Any, ids: Any, doubtful: Any) -> Any:
    """Fill in ids, and whether each is in doubt; returns how many, or TIED."""
    work = carve(room, size)
    top = take(address, FLOAT32, size, 0, 0, 0, work)
    if not -np.inf < top < np.inf:
        return 0
    ids[0], best = first(top, work)
    if chain.t == 0.0 or chain.k == 1.0:
        return 1
    kept, n = narrow(top, best, chain, work), 0
    if kept.n == TIED:
        return TIED
    if kept.n != MANY:
        for i in range(kept.n):
            ids[i], doubtful[i] = work.ids[i], work.weights[i] < 0.0
        return kept.n
    for token in range(size):
        x = carray(floats_at(address_of(token // GROUP, work)), GROUP)[token % GROUP]
        if x > kept.cut or (x == kept.cut and token <= kept.last):
            ids[n] = token
            for i in range(work.state[DOUBTED]):
                doubtful[n] |= work.doubts[i] == token
            n += 1
    return n


def left(x: np.ndarray, numbers: Sequence[float]) -> tuple[list[int], list[int]] | None:
    """The ids of the tokens that are left for certain, ascending, and of those that may be; None if nobody can say."""
    x = np.array(x, np.float32)
    ids, doubtful = np.empty(len(x), np.int64), np.zeros(len(x), bool)
    room = np.empty(room_for(len(x)))
    n = _left(x.ctypes.data, len(x), FusedParams(*map(float, numbers)), room, ids, doubtful)
    return None if n == TIED else (ids[:n][~doubtful[:n]].tolist(), ids[:n][doubtful[:n]].tolist())


def agrees(x: np.ndarray, numbers: Sequence[float], expected: Sequence[int]) -> bool:
    """Whether the chain leaves these tokens, but for those in doubt; or cannot say."""
    found = left(x, numbers)
    return found is None or set(found[0]) <= set(expected) <= set(found[0]) | set(found[1])

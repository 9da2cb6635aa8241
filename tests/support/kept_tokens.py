"""The surviving and the uncertain tokens of a row, computed by the functions of the fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray

from nucleate.jit.compiler import jit
from nucleate.sampling.cpu.block_ops import FLOAT32, GROUP_SIZE, floats_at
from nucleate.sampling.cpu.cutoffs import TIED, UNLISTED, argmax, truncate
from nucleate.sampling.cpu.fused_kernel import load_row
from nucleate.sampling.cpu.fused_runner import workspace_size
from nucleate.sampling.cpu.workspace import UNCERTAIN_COUNT, edited_group_address, workspace_in
from nucleate.sampling.pipeline import FusedParams


@jit
def _left(address: Any, size: Any, chain: Any, room: Any, ids: Any, doubtful: Any) -> Any:
    """Fill in ids, and whether each is uncertain. Returns their number, or TIED."""
    work = workspace_in(room, size)
    top = load_row(address, FLOAT32, size, 0, 0, 0, work)
    if not -np.inf < top < np.inf:
        return 0
    ids[0], best = argmax(top, work)
    if chain.t == 0.0 or chain.k == 1.0:
        return 1
    kept, n = truncate(top, best, chain, work), 0
    if kept.listed == TIED:
        return TIED
    if kept.listed != UNLISTED:
        for i in range(kept.listed):
            ids[i], doubtful[i] = work.ids[i], work.weights[i] < 0.0
        return kept.listed
    for token in range(size):
        x = carray(floats_at(edited_group_address(token // GROUP_SIZE, work)), GROUP_SIZE)[token % GROUP_SIZE]
        if x > kept.threshold or (x == kept.threshold and token <= kept.last_id):
            ids[n] = token
            for i in range(work.counters[UNCERTAIN_COUNT]):
                doubtful[n] |= work.uncertain_ids[i] == token
            n += 1
    return n


def left(x: np.ndarray, numbers: Sequence[float]) -> tuple[list[int], list[int]] | None:
    """The ids of certain survivors, ascending, and of uncertain tokens; None if the row is tied."""
    x = np.array(x, np.float32)
    ids, doubtful = np.empty(len(x), np.int64), np.zeros(len(x), bool)
    room = np.empty(workspace_size(len(x)))
    n = _left(x.ctypes.data, len(x), FusedParams(*map(float, numbers)), room, ids, doubtful)
    return None if n == TIED else (ids[:n][~doubtful[:n]].tolist(), ids[:n][doubtful[:n]].tolist())


def agrees(x: np.ndarray, numbers: Sequence[float], expected: Sequence[int]) -> bool:
    """Whether the fused kernel keeps these tokens, except for uncertain ones; True if the row is tied."""
    found = left(x, numbers)
    return found is None or set(found[0]) <= set(expected) <= set(found[0]) | set(found[1])

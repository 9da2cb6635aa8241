"""The fused kernel: edits, temperature, truncation and draw of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, from_dtype
from numba.np.unsafe.ndarray import to_fixed_tuple

from nucleate.jit.compiler import jit, kernel
from nucleate.sampling.backends.numba.fused import fused_sampler
from nucleate.sampling.backends.numba.fused.cutoffs import TIED, argmax, truncate
from nucleate.sampling.backends.numba.fused.fused_sampler import ENTRIES, ENTRY, NOT_DRAWN, POSITIONS, SLOTS, TOKENS
from nucleate.sampling.backends.numba.fused.gumbel_draw import race_candidates, race_groups
from nucleate.sampling.backends.numba.fused.logit_edits import load_row
from nucleate.sampling.backends.numba.fused.workspace import workspace_in
from nucleate.sampling.backends.numba.row_loading import doubles_at, fetch_add_one, longs_at, pointer
from nucleate.sampling.dispatch.fused_pipeline import FusedParams

PARAM_COUNT = len(FusedParams._fields)

entries_at, workspace_floats = pointer(from_dtype(ENTRY)), jit(fused_sampler.workspace_size)


@jit
def sample_row(max_score: Any, params: Any, seed: Any, step: Any, work: Any) -> Any:
    """Sample from a loaded row. NOT_DRAWN if it has NaN, +inf or no finite score, or a decision is tied."""
    if not -np.inf < max_score < np.inf:
        return np.int64(NOT_DRAWN)
    token, exact_max = argmax(max_score, work)
    if params.t == 0.0 or params.k == 1.0:
        return token
    kept = truncate(max_score, exact_max, params, work)
    if kept.listed == TIED:
        return np.int64(NOT_DRAWN)
    if kept.listed >= 0:
        return race_candidates(kept.listed, seed, step, work)
    return race_groups(kept, max_score, exact_max, params.t * params.late_t, seed, step, work)


@kernel("int64(float32[:, ::1], int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def draw_rows(
    x: Any, address: Any, row_stride: Any, dtype: Any, size: Any, mask_address: Any, mask_stride: Any, count: Any,
    next_row: Any, control: Any, workspace: Any,
) -> Any:  # fmt: skip
    """Sample rows and advance their steps. Returns how many rows this call sampled; concurrent calls share the rows.

    x, address, row_stride, dtype: see ``inputs.LogitsLayout``; x is used if address is 0. size: scores per row.
    mask_address, mask_stride: of the rows' bitmasks, in bytes; 0, 0 for none. count: number of rows. next_row: address
    of the atomic counter from which calls take rows. control: ``RowSelection.control``. workspace: address of
    ``workspace_size(size)`` float64."""
    address = address or np.int64(x.ctypes.data)
    work = workspace_in(carray(doubles_at(workspace), workspace_floats(size)), size)
    arrays = carray(longs_at(control), 4)
    positions, slots = carray(longs_at(arrays[POSITIONS]), count), carray(longs_at(arrays[SLOTS]), count)
    tokens, drawn, i = carray(longs_at(arrays[TOKENS]), count), 0, fetch_add_one(next_row)
    while i < count:
        position, slot = positions[i], slots[i]
        entry = carray(entries_at(arrays[ENTRIES]), slot + 1)[slot]
        allowed = mask_address + position * mask_stride if mask_address else mask_address
        row = address + position * row_stride
        max_score = load_row(row, dtype, size, entry.commands, entry.command_count, allowed, work)
        params = FusedParams(*to_fixed_tuple(entry.params, PARAM_COUNT))
        token = sample_row(max_score, params, entry.seed, entry.step, work)
        tokens[i] = token
        if token != NOT_DRAWN:
            entry.step += np.uint64(1)
        drawn, i = drawn + 1, fetch_add_one(next_row)
    return drawn

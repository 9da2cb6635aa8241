"""Logit edits of a row: penalties, additions, masks.

The edits come from an ``edit_program.EditProgram``. Edited scores are kept as float64, as in the reference; the groups
hold them rounded. Tokens at -inf stay there. A NaN or +inf makes the row invalid.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from nucleate.jit.compiler import inline, jit
from nucleate.sampling.backends.numba import block_ops
from nucleate.sampling.backends.numba.fused.edit_program import ALLOW, PENALISE
from nucleate.sampling.backends.numba.fused.workspace import (
    EDIT_COUNT,
    INEXACT_COUNT,
    NONE,
    edited_group_address,
    find_edit,
    score,
    set_row,
)
from nucleate.sampling.backends.numba.row_loading import (
    FLOAT32,
    apply_token_bitmask,
    convert_row,
    doubles_at,
    longs_at,
    words_at,
)
from nucleate.sampling.dispatch.fused_pipeline import EACH_TIME, SCALE


@jit
def load_row(address: Any, dtype: Any, size: Any, commands: Any, command_count: Any, mask: Any, work: Any) -> Any:
    """Load a row, compute its group maxima, and apply its edits. Returns the maximum; NaN for an invalid row or edit.

    commands, command_count: ``EditProgram.commands_at``. mask: address of the row's bitmask, or 0.
    """
    command_list = carray(longs_at(commands), (command_count, 4))
    masked = mask != 0
    for i in range(command_count):
        masked |= command_list[i, 0] == ALLOW
    work.counters[:3] = 0
    if dtype == FLOAT32 and not masked:
        set_row(address, work)
    else:
        convert_row(address, dtype, work.copies[:size])
        set_row(np.int64(work.copies.ctypes.data), work)
    top = find_group_maxima(work)  # before the edits: brings the row into the caches
    if command_count > 0:
        work.last_edit[:] = NONE
    valid = top < np.inf
    for i in range(command_count + (mask != 0)):  # the mask of the step comes last
        if i == command_count or command_list[i, 0] == ALLOW:
            valid &= apply_mask(mask if i == command_count else command_list[i, 1], work)
        elif command_list[i, 0] == PENALISE:
            table = carray(longs_at(command_list[i, 1]), 4)
            apply_penalties(table, carray(doubles_at(command_list[i, 2]), (command_list[i, 3], 2)), work)
        else:
            valid &= apply_additions(command_list[i, 1], command_list[i, 2], command_list[i, 3], work)
    if masked:
        top = find_group_maxima(work)
    if work.counters[EDIT_COUNT] > 0 and valid:
        top = update_group_maxima(top, work)
    return top if valid else np.float32(np.nan)


@jit
def find_group_maxima(work: Any) -> Any:
    """Compute the maximum of each group. Returns the maximum of the row; NaN if it has a NaN or +inf."""
    top, invalid = np.float32(-np.inf), False
    for group in range(work.group_maxima.size):
        group_max = block_ops.maximum(work.addresses[group])
        work.group_maxima[group] = group_max
        invalid |= not group_max < np.inf
        top = max(top, group_max)
    return np.float32(np.nan) if invalid else top


@inline
def store_edit(edit: Any, token: Any, x: Any, count: Any, work: Any) -> Any:
    """Store the edited score x of a token. edit: the token's edit so far, or NONE. Returns the new number of edits."""
    if edit < 0:
        edit, group = count, token >> 8
        count += 1
        work.edited_ids[edit], work.original_scores[edit] = token, score(work, token)
        work.previous_edit[edit], work.last_edit[group] = work.last_edit[group], edit
    work.edited_scores[edit] = x
    return count


@jit
def apply_penalties(table: Any, rules: Any, work: Any) -> None:
    """Apply penalties in order to each token that occurred. table: see ``IncrementalHistory.table``."""
    n, edits_before = table[3], work.counters[EDIT_COUNT]
    ids, output, x, count = carray(longs_at(table[0]), n), carray(longs_at(table[2]), n), work.scores[:n], edits_before
    for i in range(n):
        edit = find_edit(work, ids[i]) if edits_before > 0 else NONE
        x[i] = work.edited_scores[edit] if edit >= 0 else np.float64(score(work, ids[i]))
    for rule in range(len(rules)):
        apply_penalty(x, output, rules[rule, 0], rules[rule, 1])
    for i in range(n):
        count = store_edit(find_edit(work, ids[i]) if edits_before > 0 else NONE, ids[i], x[i], count, work)
    work.counters[EDIT_COUNT] = count


@jit
def apply_penalty(x: Any, output: Any, kind: Any, penalty: Any) -> None:
    """Apply one penalty. Separate loops, so that LLVM vectorises them."""
    if kind == SCALE:
        for i in range(x.size):
            x[i] = x[i] / penalty if x[i] > 0.0 else x[i] * penalty
    elif kind == EACH_TIME:
        for i in range(x.size):
            x[i] -= penalty * output[i]
    else:
        for i in range(x.size):
            x[i] -= penalty if output[i] > 0 else 0.0


@jit
def apply_additions(ids: Any, values: Any, n: Any, work: Any) -> Any:
    """Add values to the scores of n tokens. Returns False if an id is not in the vocabulary."""
    tokens, additions, count = carray(longs_at(ids), n), carray(doubles_at(values), n), work.counters[EDIT_COUNT]
    for i in range(n):
        token = tokens[i]
        if not 0 <= token < work.size:
            return False
        edit = find_edit(work, token)
        x = work.edited_scores[edit] if edit >= 0 else np.float64(score(work, token))
        count = store_edit(edit, token, x + additions[i] if x > -np.inf else x, count, work)
    work.counters[EDIT_COUNT] = count
    return True


@jit
def apply_mask(address: Any, work: Any) -> Any:
    """Remove the tokens whose bit is 0. Returns False if an edit has made one of them NaN or +inf."""
    words, valid = carray(words_at(address), (work.size + 31) // 32), True
    apply_token_bitmask(work.copies[: work.size], words)
    set_row(np.int64(work.copies.ctypes.data), work)  # the last group is a copy
    for edit in range(work.counters[EDIT_COUNT]):
        token = work.edited_ids[edit]
        if (words[token >> 5] >> (token & 31)) & 1 == 0:
            valid &= work.edited_scores[edit] < np.inf
            work.edited_scores[edit] = -np.inf
    return valid


@jit
def update_group_maxima(top: Any, work: Any) -> Any:
    """Update the group maxima after edits. Returns the maximum; NaN if an edited score is NaN or +inf."""
    invalid = not top < np.inf
    for edit in range(work.counters[EDIT_COUNT]):
        x, original = np.float32(work.edited_scores[edit]), work.original_scores[edit]
        group = work.edited_ids[edit] >> 8
        invalid |= not x < np.inf
        work.counters[INEXACT_COUNT] += np.float64(x) != work.edited_scores[edit]
        work.pending[group] |= 2 if original == work.group_maxima[group] and x < original else 1
        work.group_maxima[group] = max(work.group_maxima[group], x)
    top = np.float32(-np.inf)
    for group in range(work.group_maxima.size):
        if work.pending[group] > 1:  # the group maximum may be lower now
            work.group_maxima[group] = block_ops.maximum(edited_group_address(group, work))
        top = max(top, work.group_maxima[group])
    return np.float32(np.nan) if invalid else top

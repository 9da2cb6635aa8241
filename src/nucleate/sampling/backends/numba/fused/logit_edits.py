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
    """Take a row, find the highest score of each group, and apply its edits; returns the highest of all.

    NaN for a row from which nothing can be drawn, or whose program names a token that is not there. Arguments as of
    ``kernel.draw_rows``.
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
    top = find_group_maxima(work)  # before the edits, as it brings the row into the caches
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
    """The highest score of each group; returns the highest of all, NaN if there is one, or +inf."""
    top, invalid = np.float32(-np.inf), False
    for group in range(work.group_maxima.size):
        group_max = block_ops.maximum(work.addresses[group])
        work.group_maxima[group] = group_max
        invalid |= not group_max < np.inf
        top = max(top, group_max)
    return np.float32(np.nan) if invalid else top


@inline
def store_edit(edit: Any, token: Any, x: Any, count: Any, work: Any) -> Any:
    """Hold the score that an edit gives a token; returns how many edits there are then. edit: its last, or NOBODY."""
    if edit < 0:
        edit, group = count, token >> 8
        count += 1
        work.edited_ids[edit], work.original_scores[edit] = token, score(work, token)
        work.previous_edit[edit], work.last_edit[group] = work.last_edit[group], edit
    work.edited_scores[edit] = x
    return count


@jit
def apply_penalties(table: Any, rules: Any, work: Any) -> None:
    """Penalties one after the other, for each token that occurred. table: see ``Tally.table``."""
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
    """One penalty. Loops of their own, so that they become vectors."""
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
    """Add to the scores of a list of tokens. False if one is not there."""
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
    """Take out the tokens whose bit is 0, edited ones too. False if an edit has made one of these NaN or +inf."""
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
    """The highest score of each group, and of all, with edits; NaN if one of them is none."""
    invalid = not top < np.inf
    for edit in range(work.counters[EDIT_COUNT]):
        x, original, group = (
            np.float32(work.edited_scores[edit]),
            work.original_scores[edit],
            work.edited_ids[edit] >> 8,
        )
        invalid |= not x < np.inf
        work.counters[INEXACT_COUNT] += np.float64(x) != work.edited_scores[edit]
        work.pending[group] |= 2 if original == work.group_maxima[group] and x < original else 1
        work.group_maxima[group] = max(work.group_maxima[group], x)
    top = np.float32(-np.inf)
    for group in range(work.group_maxima.size):
        if work.pending[group] > 1:  # its highest score may be lower now
            work.group_maxima[group] = block_ops.maximum(edited_group_address(group, work))
        top = max(top, work.group_maxima[group])
    return np.float32(np.nan) if invalid else top

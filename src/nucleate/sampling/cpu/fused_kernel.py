"""The fused kernel: edits, temperature, truncation (``cutoffs``) and draw of rows.

**Edits** (penalties, additions, masks) come from an ``EditProgram``. Edited scores are kept as float64, as in the
reference; the groups hold them rounded. Tokens at -inf stay there. A NaN or +inf makes the row invalid.

**The draw** is the two-level Gumbel draw as an exponential race: argmax of log m + gumbel(u) is argmin of e / m, e =
-log1p(-u). Since e >= u, most entries lose before a logarithm is computed, and most groups before their mass is: 256
times the weight of the group maximum bounds it. The winner must lead by more than the error of the times, else the row
is NOT_DRAWN. For float32 masses that error is ``workspace.FLOAT32_ERROR``. In float64, a time takes ten operations on
numbers below 64 and a sum of 256, here and in the reference: an error below 1300 units of 2^-53. TIME_ERROR is 9000
units.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, from_dtype
from numba.np.unsafe.ndarray import to_fixed_tuple

from nucleate.jit.compiler import inline, jit, kernel
from nucleate.sampling.cpu import block_ops, fused_runner
from nucleate.sampling.cpu.block_ops import (
    FLOAT32,
    GROUP_SIZE,
    convert_row,
    doubles_at,
    fetch_add_one,
    longs_at,
    pointer,
    words_at,
)
from nucleate.sampling.cpu.cutoffs import TIED, argmax, truncate
from nucleate.sampling.cpu.fused_runner import ALLOW, ENTRIES, ENTRY, NOT_DRAWN, PENALISE, POSITIONS, SLOTS, TOKENS
from nucleate.sampling.cpu.kernel_maths import exp, uniform, uniforms
from nucleate.sampling.cpu.prefix_selection import next_up
from nucleate.sampling.cpu.row_kernels import apply_token_bitmask
from nucleate.sampling.cpu.workspace import (
    EDIT_COUNT,
    FLOAT32_ERROR,
    INEXACT_COUNT,
    NONE,
    UNCERTAIN_COUNT,
    edited_group_address,
    find_edit,
    group_mass,
    score,
    set_row,
    weigh_group,
    weight_error,
    weight_exponent,
    workspace_in,
)
from nucleate.sampling.noise import GROUP as GROUP_STREAM
from nucleate.sampling.noise import TOKEN as TOKEN_STREAM
from nucleate.sampling.pipeline import FREQUENCY, REPETITION, FusedParams


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
    if kind == REPETITION:
        for i in range(x.size):
            x[i] = x[i] / penalty if x[i] > 0.0 else x[i] * penalty
    elif kind == FREQUENCY:
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


TIME_ERROR = 1e-12
"""Relative error of a time in float64."""


@jit
def uncertain_mass(group: Any, exact_max: Any, t: Any, work: Any) -> Any:
    """The weight of a group's uncertain tokens."""
    mass = 0.0
    for i in range(work.counters[UNCERTAIN_COUNT]):
        if work.uncertain_ids[i] >> 8 == group:
            mass += math.exp((np.float64(score(work, work.uncertain_ids[i])) - exact_max) / t) * (1.0 + FLOAT32_ERROR)
    return mass


@jit
def race_groups(kept: Any, max_score: Any, exact_max: Any, t: Any, seed: Any, step: Any, work: Any) -> Any:
    """Draw from surviving tokens that are not listed. max_score, exact_max: see ``cutoffs.truncate``."""
    exponent, error = weight_exponent(max_score, t), weight_error(max_score, t, work)
    groups, times = work.group_maxima.size, work.race_times
    uniforms(work.noise, groups, seed, step, GROUP_STREAM, 0)
    for group in range(groups):  # lower bounds
        e = work.noise[group] * (1.0 - 2.0 * error)
        times[group] = e / (GROUP_SIZE * exp((np.float64(work.group_maxima[group]) - exact_max) / t))
    first = 0
    for group in range(groups):
        if work.group_maxima[group] < kept.threshold:
            times[group] = np.inf
        first = group if times[group] < times[first] else first
    winner: Any = np.int64(NOT_DRAWN)
    best_time, best_latest, second_time = np.inf, np.inf, np.inf
    for index in range(-1, groups):
        group = first if index < 0 else index
        if index == first or not times[group] <= best_latest:
            continue
        start = group * GROUP_SIZE
        if start <= kept.last_id < start + GROUP_SIZE:
            mass = weigh_group(kept, group, exact_max, t, work)
        else:
            threshold = next_up(kept.threshold) if start > kept.last_id else kept.threshold
            mass = group_mass(group, threshold, exponent, work)
        e, min_mass = -math.log1p(-work.noise[group]), mass * (1.0 - error)
        if work.counters[UNCERTAIN_COUNT] > 0:
            min_mass -= uncertain_mass(group, exact_max, t, work)
        earliest = e / (mass * (1.0 + error)) if mass > 0.0 else np.inf
        if earliest < best_time:
            winner, best_time, second_time = group, earliest, best_time
            best_latest = e / min_mass if min_mass > 0.0 else np.inf
        else:
            second_time = min(second_time, earliest)
    return NOT_DRAWN if second_time <= best_latest else race_in_group(kept, winner, exact_max, t, seed, step, work)


@jit
def race_in_group(kept: Any, group: Any, exact_max: Any, t: Any, seed: Any, step: Any, work: Any) -> Any:
    """Draw a token of the winning group."""
    start = group * GROUP_SIZE
    weigh_group(kept, group, exact_max, t, work)
    uniforms(work.noise, GROUP_SIZE, seed, step, TOKEN_STREAM, start)
    for i in range(GROUP_SIZE):
        work.ids[i] = start + i
    for i in range(work.counters[UNCERTAIN_COUNT]):
        if work.uncertain_ids[i] >> 8 == group:
            work.weights[work.uncertain_ids[i] & 255] *= -1.0
    return race_tokens(0, GROUP_SIZE, work)


@jit
def race_candidates(n: Any, seed: Any, step: Any, work: Any) -> Any:
    """Draw from n candidates in ascending order of ids. Uncertain tokens have negative weights."""
    ids, weights = work.ids, work.weights
    best_time, best_latest, second_time, best_start, best_end, i = np.inf, np.inf, np.inf, 0, 0, 0
    while i < n:
        group, start, mass, min_mass = ids[i] >> 8, i, 0.0, 0.0
        while i < n and ids[i] >> 8 == group:
            mass += abs(weights[i])
            min_mass += max(weights[i], 0.0)
            i += 1
        u = uniform(seed, step, GROUP_STREAM, group)
        if u < second_time * mass:
            e = -math.log1p(-u)
            time = e / mass
            if time < best_time:
                best_time, second_time, best_start, best_end = time, best_time, start, i
                best_latest = e / min_mass if min_mass > 0.0 else np.inf
            else:
                second_time = min(second_time, time)
    if second_time * (1.0 - TIME_ERROR) <= best_latest:
        return NOT_DRAWN
    for i in range(best_start, best_end):
        work.noise[i - best_start] = uniform(seed, step, TOKEN_STREAM, ids[i])
    return race_tokens(best_start, best_end, work)


@jit
def race_tokens(first: Any, end: Any, work: Any) -> Any:
    """Draw from the candidates first..end, all of one group, with the noise in ``work.noise``."""
    winner: Any = np.int64(NOT_DRAWN)
    best_time, second_time = np.inf, np.inf
    for i in range(first, end):
        u, weight = work.noise[i - first], abs(work.weights[i])
        if u < second_time * weight:
            time = -math.log1p(-u) / weight
            if time < best_time:
                best_time, second_time, winner = time, best_time, work.ids[i] if work.weights[i] > 0.0 else NOT_DRAWN
            else:
                second_time = min(second_time, time)
    return NOT_DRAWN if second_time * (1.0 - TIME_ERROR) <= best_time else winner


PARAM_COUNT = len(FusedParams._fields)

entries_at, workspace_floats = pointer(from_dtype(ENTRY)), jit(fused_runner.workspace_size)


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

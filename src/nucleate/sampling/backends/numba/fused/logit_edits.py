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
from nucleate.sampling.backends.numba.fused.edit_program import ALLOW, COUNTED
from nucleate.sampling.backends.numba.fused.row_table import FLOAT32
from nucleate.sampling.backends.numba.fused.workspace import EDITED, INEXACT, NOBODY, address_of, edit_of, lay, score
from nucleate.sampling.backends.numba.row_loading import copy, doubles_at, forbid, longs_at, words_at
from nucleate.sampling.dispatch.fused_pipeline import FREQUENCY, REPETITION


@jit
def take(address: Any, kind: Any, size: Any, program: Any, orders: Any, mask: Any, work: Any) -> Any:
    """Take a row, find the highest score of each group, and apply its edits; returns the highest of all.

    NaN for a row from which nothing can be drawn, or whose program names a token that is not there. Arguments as of
    ``kernel.draw_rows``.
    """
    steps = carray(longs_at(program), (orders, 4))
    masked = mask != 0
    for i in range(orders):
        masked |= steps[i, 0] == ALLOW
    work.state[:3] = 0
    if kind == FLOAT32 and not masked:
        lay(address, work)
    else:
        copy(address, kind, work.x[:size])
        lay(np.int64(work.x.ctypes.data), work)
    top = read(work)  # before the edits, as it brings the row into the caches
    if orders > 0:
        work.newest[:] = NOBODY
    well = top < np.inf
    for i in range(orders + (mask != 0)):  # the mask of the step comes last
        if i == orders or steps[i, 0] == ALLOW:
            well &= ban(mask if i == orders else steps[i, 1], work)
        elif steps[i, 0] == COUNTED:
            table = carray(longs_at(steps[i, 1]), 4)
            penalise(table, carray(doubles_at(steps[i, 2]), (steps[i, 3], 2)), work)
        else:
            well &= add(steps[i, 1], steps[i, 2], steps[i, 3], work)
    if masked:
        top = read(work)
    if work.state[EDITED] > 0 and well:
        top = settle(top, work)
    return top if well else np.float32(np.nan)


@jit
def read(work: Any) -> Any:
    """The highest score of each group; returns the highest of all, NaN if there is one, or +inf."""
    top, wrong = np.float32(-np.inf), False
    for group in range(work.tops.size):
        best = block_ops.top(work.at[group])
        work.tops[group] = best
        wrong |= not best < np.inf
        top = max(top, best)
    return np.float32(np.nan) if wrong else top


@inline
def hold(edit: Any, token: Any, x: Any, count: Any, work: Any) -> Any:
    """Hold the score that an edit gives a token; returns how many edits there are then. edit: its last, or NOBODY."""
    if edit < 0:
        edit, group = count, token >> 8
        count += 1
        work.tokens[edit], work.raw[edit] = token, score(work, token)
        work.earlier[edit], work.newest[group] = work.newest[group], edit
    work.values[edit] = x
    return count


@jit
def penalise(table: Any, rules: Any, work: Any) -> None:
    """Penalties one after the other, for each token that occurred. table: see ``TokenCounter.table``."""
    n, had = table[3], work.state[EDITED]
    ids, output, x, count = carray(longs_at(table[0]), n), carray(longs_at(table[2]), n), work.scores[:n], had
    for i in range(n):
        edit = edit_of(work, ids[i]) if had > 0 else NOBODY
        x[i] = work.values[edit] if edit >= 0 else np.float64(score(work, ids[i]))
    for rule in range(len(rules)):
        lower(x, output, rules[rule, 0], rules[rule, 1])
    for i in range(n):
        count = hold(edit_of(work, ids[i]) if had > 0 else NOBODY, ids[i], x[i], count, work)
    work.state[EDITED] = count


@jit
def lower(x: Any, output: Any, code: Any, number: Any) -> None:
    """One penalty. Loops of their own, so that they become vectors."""
    if code == REPETITION:
        for i in range(x.size):
            x[i] = x[i] / number if x[i] > 0.0 else x[i] * number
    elif code == FREQUENCY:
        for i in range(x.size):
            x[i] -= number * output[i]
    else:
        for i in range(x.size):
            x[i] -= number if output[i] > 0 else 0.0


@jit
def add(ids: Any, numbers: Any, n: Any, work: Any) -> Any:
    """Add to the scores of a list of tokens. False if one is not there."""
    tokens, more, count = carray(longs_at(ids), n), carray(doubles_at(numbers), n), work.state[EDITED]
    for i in range(n):
        token = tokens[i]
        if not 0 <= token < work.size:
            return False
        edit = edit_of(work, token)
        x = work.values[edit] if edit >= 0 else np.float64(score(work, token))
        count = hold(edit, token, x + more[i] if x > -np.inf else x, count, work)
    work.state[EDITED] = count
    return True


@jit
def ban(address: Any, work: Any) -> Any:
    """Take out the tokens whose bit is 0, edited ones too. False if an edit has made one of these NaN or +inf."""
    words, well = carray(words_at(address), (work.size + 31) // 32), True
    forbid(work.x[: work.size], words)
    lay(np.int64(work.x.ctypes.data), work)  # the last group is a copy
    for edit in range(work.state[EDITED]):
        token = work.tokens[edit]
        if (words[token >> 5] >> (token & 31)) & 1 == 0:
            well &= work.values[edit] < np.inf
            work.values[edit] = -np.inf
    return well


@jit
def settle(top: Any, work: Any) -> Any:
    """The highest score of each group, and of all, with edits; NaN if one of them is none."""
    wrong = not top < np.inf
    for edit in range(work.state[EDITED]):
        x, before, group = np.float32(work.values[edit]), work.raw[edit], work.tokens[edit] >> 8
        wrong |= not x < np.inf
        work.state[INEXACT] += np.float64(x) != work.values[edit]
        work.pending[group] |= 2 if before == work.tops[group] and x < before else 1
        work.tops[group] = max(work.tops[group], x)
    top = np.float32(-np.inf)
    for group in range(work.tops.size):
        if work.pending[group] > 1:  # its highest score may be lower now
            work.tops[group] = block_ops.top(address_of(group, work))
        top = max(top, work.tops[group])
    return np.float32(np.nan) if wrong else top

"""Shifts on a row: penalties of tokens that occurred, numbers added to tokens of a list, masks.

What a row is to go through is a ``program.Program``. Scores that change are kept as float64, as the reference has them;
their groups get them rounded. Tokens at -inf stay there; what is NaN or +inf makes the row one that nothing is drawn
from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from nucleate.backends.chain import EACH_TIME, SCALE
from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import inline, jit
from nucleate.backends.cpu.load import copy, doubles_at, floats_at, longs_at, words_at
from nucleate.backends.cpu.special.program import ALLOW, COUNTED
from nucleate.backends.cpu.special.table import FLOAT32
from nucleate.backends.cpu.special.work import EDITED, INEXACT, NOBODY, edit_of, lay, patch, score


@jit
def take(address: Any, kind: Any, size: Any, program: Any, orders: Any, mask: Any, work: Any) -> Any:
    """Take a row, find the highest score of each group, and apply its edits; returns the highest of all.

    NaN for a row from which nothing can be drawn, or whose program names a token that is not there. Arguments as of
    ``chain.draw_rows``.
    """
    steps = carray(longs_at(program), (orders, 4))
    masked = mask != 0
    for i in range(orders):
        masked |= steps[i, 0] == ALLOW
    x, well = work.x[:size], True
    if kind == FLOAT32 and not masked:
        lay(carray(floats_at(address), size), work)
    else:
        copy(address, kind, x)
        lay(x, work)
    if orders > 0:
        work.pending[:] = 0
        work.newest[:] = NOBODY
    for i in range(orders + (mask != 0)):  # the mask of the step comes last
        if i == orders or steps[i, 0] == ALLOW:
            well &= ban(x, mask if i == orders else steps[i, 1], work)
        elif steps[i, 0] == COUNTED:
            table = carray(longs_at(steps[i, 1]), 4)
            penalise(table, carray(doubles_at(steps[i, 2]), (steps[i, 3], 2)), work)
        else:
            well &= add(steps[i, 1], steps[i, 2], steps[i, 3], work)
    top = read(work) if well else np.float32(np.nan)
    return settle(top, work) if work.state[EDITED] > 0 and well else top


@jit
def read(work: Any) -> Any:
    """The highest score of each group; returns the highest of all, NaN if there is one, or +inf."""
    top, wrong = np.float32(-np.inf), False
    for group in range(work.tops.size):
        best = simd.top(work.at[group], 0)
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
        work.tokens[edit] = token
        work.earlier[edit], work.newest[group] = work.newest[group], edit
    work.values[edit] = x
    return count


@jit
def penalise(table: Any, rules: Any, work: Any) -> None:
    """Penalties one after the other, for each token that occurred. table: see ``Tally.table``."""
    n, had = table[3], work.state[EDITED]
    ids, output, count = carray(longs_at(table[0]), n), carray(longs_at(table[2]), n), had
    for i in range(n):
        token = ids[i]
        edit = edit_of(work, token) if had > 0 else NOBODY
        x = work.values[edit] if edit >= 0 else np.float64(score(work, token))
        for rule in range(len(rules)):
            code, number = rules[rule, 0], rules[rule, 1]
            if code == SCALE:
                x = x / number if x > 0.0 else x * number
            elif output[i] > 0:
                x -= number * output[i] if code == EACH_TIME else number
        count = hold(edit, token, x, count, work)
    work.state[EDITED] = count


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
def ban(x: Any, address: Any, work: Any) -> Any:
    """Take out the tokens whose bit is 0, edited ones too. False if an edit has made one of these NaN or +inf."""
    words, had, well = carray(words_at(address), (x.size + 31) // 32), work.state[EDITED], True
    forbid(x, words)
    lay(x, work)  # the last group is a copy
    work.state[EDITED] = had
    for edit in range(had):
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
        token, x = work.tokens[edit], np.float32(work.values[edit])
        group = token >> 8
        before, best = score(work, token), work.tops[group]
        wrong |= not x < np.inf
        work.state[INEXACT] += np.float64(x) != work.values[edit]
        work.pending[group] |= 2 if before == best and x < before else 1
        work.tops[group] = max(best, x)
    top = np.float32(-np.inf)
    for group in range(work.tops.size):
        if work.pending[group] > 1:  # its highest score may be lower now
            patch(work, group)
            work.tops[group] = simd.top(work.at[group], 0)
        top = max(top, work.tops[group])
    return np.float32(np.nan) if wrong else top


@jit
def forbid(x: Any, words: Any) -> None:
    """Take out the tokens whose bit is 0. words: int32 [V / 32]."""
    for word in range(words.size):
        if words[word] != -1:
            start = word * 32
            if start + 32 <= x.size:
                simd.forbid(x, start, words[word])
            else:
                for bit in range(x.size - start):
                    if (words[word] >> bit) & 1 == 0:
                        x[start + bit] -= np.float32(np.inf)

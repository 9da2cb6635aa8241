"""Shifts on a row in place, compiled: penalties of tokens that occurred, numbers added to tokens of a list, masks.

What a row is to go through is a ``program.Program``; its codes are here. Tokens at -inf stay there; what is NaN or +inf
stays so, and makes the row one that nothing is drawn from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from nucleate.backends.chain import EACH_TIME, SCALE
from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.load import doubles_at, longs_at, words_at
from nucleate.backends.cpu.special.program import ADD, COUNTED


@jit
def edit(x: Any, address: Any, count: Any) -> Any:
    """Run a program. x: float32 [V]. False if it names a token that is not there."""
    orders = carray(longs_at(address), (count, 4))
    for i in range(count):
        code, first, second, size = orders[i, 0], orders[i, 1], orders[i, 2], orders[i, 3]
        if code == COUNTED:
            penalise(x, carray(longs_at(first), 4), carray(doubles_at(second), (size, 2)))
        elif code != ADD:
            forbid(x, carray(words_at(first), (x.size + 31) // 32))
        elif not add(x, carray(longs_at(first), size), carray(doubles_at(second), size)):
            return False
    return True


@jit
def penalise(x: Any, table: Any, rules: Any) -> None:
    """Penalties one after the other, in float64, for each token that occurred. table: see ``Tally.table``."""
    n = table[3]
    ids, output = carray(longs_at(table[0]), n), carray(longs_at(table[2]), n)
    for i in range(n):
        score = np.float64(x[ids[i]])
        if score > -np.inf:
            for rule in range(len(rules)):
                code, number = rules[rule, 0], rules[rule, 1]
                if code == SCALE:
                    score = score / number if score > 0.0 else score * number
                elif output[i] > 0:
                    score -= number * output[i] if code == EACH_TIME else number
            x[ids[i]] = np.float32(score)


@jit
def add(x: Any, ids: Any, numbers: Any) -> Any:
    """Add to the scores of a list of tokens. False if one is not there."""
    for i in range(ids.size):
        token = ids[i]
        if not 0 <= token < x.size:
            return False
        if x[token] > -np.inf:
            x[token] = np.float32(np.float64(x[token]) + numbers[i])
    return True


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

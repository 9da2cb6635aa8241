"""Compiled n-gram drafts. A hash table with linear probing maps each n-gram of a text to the position after it.

table [rows, 2]: the position after the last occurrence of an n-gram, and n. Position 0: the row is empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.jit.compiler import jit, kernel


@jit
def _hash(value: Any, token: Any, factor: Any) -> Any:
    """The hash of an n-gram, given the hash of all its tokens but the first."""
    value = (value ^ np.uint64(token)) * factor
    return (value ^ (value >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)


@jit
def _find(table: Any, text: Any, position: Any, n: Any, value: Any) -> Any:
    """The row of the n-gram before a position, or the empty row where it belongs. value: its hash."""
    mask = table.shape[0] - 1
    row = np.int64(value >> np.uint64(32)) & mask
    while table[row, 0] != 0:
        if table[row, 1] == n:
            other, equal = np.int64(table[row, 0]), np.int64(0)
            while equal < n and text[other - equal - 1] == text[position - equal - 1]:
                equal += 1
            if equal == n:
                break
        row = (row + 1) & mask
    return row


@kernel("int64(int32[:, ::1], int64, int64, uint64, int64[::1], int64, int64, int64, int64, int64[::1])")
def draft_ngram(
    table: Any, shortest: Any, longest: Any, factor: Any, text: Any, start: Any, stop: Any, size: Any, count: Any,
    out: Any,
) -> Any:  # fmt: skip
    """Continue the last n-gram that equals the end of text[:size], for the highest n with a match.

    n is ``shortest`` to ``longest``. First the n-grams before the positions ``start`` to ``stop`` (exclusive) are
    stored; the table must have room for them. out: the next ``count`` tokens; a continuation that reaches the end of
    the text repeats itself. Returns ``count``, or 0 without a match.
    """
    for position in range(start, stop):
        value = factor
        for n in range(1, min(longest, position) + 1):
            value = _hash(value, text[position - n], factor)
            if n >= shortest:
                row = _find(table, text, position, n, value)
                table[row, 0], table[row, 1] = position, n
    value, after = factor, np.int64(0)
    for n in range(1, min(longest, size) + 1):
        value = _hash(value, text[size - n], factor)
        if n >= shortest:
            row = _find(table, text, size, n, value)
            if table[row, 0] == 0:  # then there is no longer match either
                break
            after = np.int64(table[row, 0])
    if after == 0:
        return 0
    for i in range(count):
        out[i] = text[after + i] if after + i < size else out[after + i - size]
    return count


@kernel("void(int32[:, ::1], int32[:, ::1], uint64, int64[::1])")
def move_ngrams(table: Any, larger: Any, factor: Any, text: Any) -> None:
    """Move the n-grams to a larger table, which is empty."""
    for old in range(table.shape[0]):
        position, n, value = np.int64(table[old, 0]), np.int64(table[old, 1]), factor
        if position != 0:
            for i in range(n):
                value = _hash(value, text[position - i - 1], factor)
            row = _find(larger, text, position, n, value)
            larger[row, 0], larger[row, 1] = position, n

"""Compiled suffix drafts: the most likely symbols after the suffixes of a sequence.

The arrays of three automata (``CountingAutomaton``) are arguments: of the sequence, and of the recent outputs. Of
suffixes that end at the same positions in a text, only the longest is continued. If several drafts have the same
expected number of accepted symbols, the first one wins.

The other arguments: the text, the size of which is ``size``; ``count``, the maximum number of symbols;
``max_length``, the maximum length of a suffix and of a draft; ``max_factor``, the maximum ratio of these;
``min_probability``, the minimum estimated probability of a symbol.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.jit.compiler import jit, kernel
from nucleate.sampling.suffix_automaton import NOTHING, ROOT
from nucleate.speculative.proposers.counting_automaton import (
    CONTINUED,
    COUNT,
    LENGTH,
    LINK,
    SIZE,
    SUFFIX_STATE,
    SYMBOL,
    TARGET,
    TOP,
)
from nucleate.speculative.proposers.suffix_kernels import find_edge, shortened

AUTOMATA = ", ".join(["int64[::1]", *["int32[:, ::1], int64[:, ::1]"] * 3])
OPTIONS = "uint64, int64[::1], int64, int64, int64, float64, float64"

SHORT = 4
"""The length up to which suffixes are matched first."""


@kernel(f"int64({AUTOMATA}, {OPTIONS}, int64[:, ::1])")
def draft_chain(
    head: Any, states_0: Any, edges_0: Any, states_1: Any, edges_1: Any, states_2: Any, edges_2: Any,
    factor: Any, text: Any, size: Any, count: Any, max_length: Any, max_factor: Any, min_probability: Any, out_2N: Any,
) -> Any:  # fmt: skip
    """The continuation with the highest expected number of accepted symbols: out_2N[0]. Returns its length."""
    found, best = np.int64(0), 0.0
    text_state = head[SUFFIX_STATE] if head[SIZE] == size else np.int64(NOTHING)  # known in the first automaton only
    for states, edges in ((states_0, edges_0), (states_1, edges_1), (states_2, edges_2)):
        state, length = match(states, edges, factor, text, size, max_length, text_state)
        text_state = np.int64(NOTHING)
        while state != ROOT:
            limit = np.int64(min(np.float64(min(count, max_length)), max_factor * length))
            symbols, score = _follow(states, edges, state, limit, min_probability, out_2N[1])
            if score > best:
                found, best = symbols, score
                for i in range(found):
                    out_2N[0, i] = out_2N[1, i]
            state = np.int64(states[state, LINK])
            length = np.int64(states[state, LENGTH])
    return found


@jit
def _follow(states: Any, edges: Any, state: Any, limit: Any, min_probability: Any, out_N: Any) -> Any:
    """The most frequent continuation of a state: its length, and its expected number of accepted symbols."""
    n, score, probability = np.int64(0), 0.0, 1.0
    while n < limit:
        top = states[state, TOP]
        if top == NOTHING or edges[top, SYMBOL] == NOTHING:
            break
        after = edges[top, TARGET]
        probability *= np.float64(states[after, COUNT]) / np.float64(states[state, CONTINUED])
        if probability < min_probability:
            break
        out_N[n] = edges[top, SYMBOL]
        n, score, state = n + 1, score + probability, after
    return n, score


@jit
def match(states: Any, edges: Any, factor: Any, text: Any, size: Any, max_length: Any, text_state: Any) -> Any:
    """The longest suffix of text[:size] of at most ``max_length`` symbols that occurs: its state, and its length.

    text_state: the state of a longer suffix, if known; otherwise NOTHING.
    """
    if text_state != NOTHING:
        length = min(size, max_length)
        return shortened(states, text_state, length), length
    state, length = _match(states, edges, factor, text, max(0, size - min(max_length, SHORT)), size)
    if length < SHORT:  # most suffixes are short; then there is no longer one
        return state, length
    return _match(states, edges, factor, text, max(0, size - max_length), size)


@jit
def _match(states: Any, edges: Any, factor: Any, text: Any, start: Any, stop: Any) -> Any:
    """The same for the suffixes of text[start:stop]."""
    state, length = np.int64(ROOT), np.int64(0)
    for position in range(start, stop):
        row = find_edge(edges, factor, state, text[position])
        while edges[row, TARGET] == ROOT and state != ROOT:
            state = np.int64(states[state, LINK])
            length = np.int64(states[state, LENGTH])
            row = find_edge(edges, factor, state, text[position])
        if edges[row, TARGET] != ROOT:
            state, length = edges[row, TARGET], length + 1
    return state, length

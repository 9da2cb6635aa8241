"""Compiled suffix automata: appending symbols. See ``CountingAutomaton`` for the arrays; factor: ``HASH_FACTOR``."""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.jit.compiler import jit, kernel
from nucleate.sampling.suffix_automaton import NOTHING, ROOT
from nucleate.speculative.proposers.counting_automaton import (
    CONTINUED,
    COUNT,
    FIRST,
    LAST,
    LENGTH,
    LINK,
    NEXT,
    NUM_STATES,
    SIZE,
    SOURCE,
    SUFFIX_STATE,
    SYMBOL,
    TARGET,
    TOP,
)


@jit
def find_edge(edges: Any, factor: Any, state: Any, symbol: Any) -> Any:
    """The row of an edge; an empty row if there is no such edge."""
    mixed = (np.uint64(state) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(symbol)) * factor
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    mask = edges.shape[0] - 1
    row = np.int64(mixed >> np.uint64(32)) & mask
    while edges[row, TARGET] != ROOT and (edges[row, SYMBOL] != symbol or edges[row, SOURCE] != state):
        row = (row + 1) & mask
    return row


@jit
def _add_edge(states: Any, edges: Any, row: Any, state: Any, symbol: Any, target: Any) -> None:
    edges[row, SYMBOL], edges[row, SOURCE], edges[row, TARGET] = symbol, state, target
    edges[row, NEXT], states[state, FIRST] = states[state, FIRST], row


@jit
def _add_state(head: Any, states: Any, length: Any) -> Any:
    state = head[NUM_STATES]
    head[NUM_STATES] = state + 1
    states[state, LINK], states[state, LENGTH] = ROOT, length
    states[state, TOP], states[state, FIRST] = NOTHING, NOTHING
    return state


@kernel("void(int32[:, ::1], int64, int64[:, ::1], int64[:, ::1], uint64)")
def move_edges(states: Any, num_states: Any, edges: Any, larger: Any, factor: Any) -> None:
    """Move the edges to a larger table, which is empty."""
    for state in range(num_states):
        old, top = np.int64(states[state, FIRST]), states[state, TOP]
        states[state, FIRST] = NOTHING
        while old != NOTHING:
            row = find_edge(larger, factor, state, edges[old, SYMBOL])
            _add_edge(states, larger, row, state, edges[old, SYMBOL], edges[old, TARGET])
            if old == top:
                states[state, TOP] = row
            old = edges[old, NEXT]


@kernel("void(int64[::1], int32[:, ::1], int64[:, ::1], int64, uint64, int64[::1], int64, int64)")
def push_symbols(
    head: Any, states: Any, edges: Any, depth: Any, factor: Any, symbols: Any, start: Any, stop: Any
) -> None:
    """Append symbols[start:stop]. The arrays must have room for them."""
    for position in range(start, stop):
        symbol, previous = symbols[position], head[SUFFIX_STATE]
        _append(head, states, edges, factor, symbol)
        head[SIZE] += 1
        state = edges[find_edge(edges, factor, previous, symbol), TARGET]
        state = shortened(states, state, min(depth, head[SIZE]))
        head[SUFFIX_STATE] = state
        _count_suffixes(states, edges, factor, state, previous, symbol)


@jit
def _append(head: Any, states: Any, edges: Any, factor: Any, symbol: Any) -> None:
    """Add the states and edges of a symbol."""
    state = head[LAST]
    new = _add_state(head, states, states[state, LENGTH] + 1)
    head[LAST] = new
    while state != NOTHING:
        row = find_edge(edges, factor, state, symbol)
        if edges[row, TARGET] != ROOT:
            states[new, LINK] = _suffix_target(head, states, edges, factor, row)
            return
        _add_edge(states, edges, row, state, symbol, new)
        state = np.int64(states[state, LINK])


@jit
def _suffix_target(head: Any, states: Any, edges: Any, factor: Any, row: Any) -> Any:
    """The state of a suffix plus one symbol, after an edge; cloned if it also stands for longer substrings."""
    state, symbol, old = edges[row, SOURCE], edges[row, SYMBOL], edges[row, TARGET]
    length = states[state, LENGTH] + 1
    if states[old, LENGTH] == length:
        return old
    split = _add_state(head, states, length)
    for column in (LINK, COUNT, CONTINUED):
        states[split, column] = states[old, column]
    edge = np.int64(states[old, FIRST])
    while edge != NOTHING:
        copy = find_edge(edges, factor, split, edges[edge, SYMBOL])
        _add_edge(states, edges, copy, split, edges[edge, SYMBOL], edges[edge, TARGET])
        if edge == states[old, TOP]:
            states[split, TOP] = copy
        edge = edges[edge, NEXT]
    states[old, LINK] = split
    while edges[row, TARGET] == old:
        edges[row, TARGET] = split
        state = np.int64(states[state, LINK])
        if state == NOTHING:
            break
        row = find_edge(edges, factor, state, symbol)
    return split


@jit
def shortened(states: Any, state: Any, length: Any) -> Any:
    """The state of the suffix with this length, given the state of a longer one."""
    while states[state, LINK] != NOTHING and states[states[state, LINK], LENGTH] >= length:
        state = np.int64(states[state, LINK])
    return state


@jit
def _count_suffixes(states: Any, edges: Any, factor: Any, state: Any, previous: Any, symbol: Any) -> None:
    """Count the suffixes of the text, and the symbol as the continuation of the previous ones."""
    while state != NOTHING:
        states[state, COUNT] += 1
        state = np.int64(states[state, LINK])
    while previous != NOTHING:
        states[previous, CONTINUED] += 1
        top = np.int64(states[previous, TOP])
        if top == NOTHING or edges[top, SYMBOL] != symbol:
            row = find_edge(edges, factor, previous, symbol)
            if top == NOTHING or states[edges[row, TARGET], COUNT] >= states[edges[top, TARGET], COUNT]:
                states[previous, TOP] = row
        previous = np.int64(states[previous, LINK])

"""Compiled lookups of drafts: suffix automata of texts, and n-grams. factor: ``HASH_FACTOR``.

See ``CountingAutomaton`` for the arrays of an automaton.

Of drafts, the arrays of three automata are arguments: of the sequence, and of the recent outputs. Of suffixes that end
at the same positions in a text, only the longest is continued. If several drafts have the same expected number of
accepted symbols, the first one wins.

The other arguments: the text, the size of which is ``size``; ``count``, the maximum number of symbols;
``max_length``, the maximum length of a suffix and of a draft; ``max_factor``, the maximum ratio of these;
``min_probability``, the minimum estimated probability of a symbol.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.jit.compiler import jit, kernel
from nucleate.sampling.suffix_automaton import NOTHING, ROOT
from nucleate.speculative.draft import ROOT as ROOT_NODE
from nucleate.speculative.suffix import (
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


AUTOMATA = ", ".join(["int64[::1]", *["int32[:, ::1], int64[:, ::1]"] * 3])
OPTIONS = "uint64, int64[::1], int64, int64, int64, float64, float64"


SHORT = 4
"""The length up to which suffixes are matched first."""


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


TOKEN, PARENT, STATE, DEPTH, NODE_TOKEN, NODE_PARENT, BEST_TOKEN, BEST_PARENT = range(8)
"""The rows of the arrays of a tree: the candidates, most likely first; the nodes, and those of the best tree."""


@kernel(f"int64({AUTOMATA}, {OPTIONS}, int64[::1], int64[:, ::1], float64[::1])")
def draft_tree(
    head: Any, states_0: Any, edges_0: Any, states_1: Any, edges_1: Any, states_2: Any, edges_2: Any,
    factor: Any, text: Any, size: Any, count: Any, max_length: Any, max_factor: Any, min_probability: Any,
    ranked_W: Any, tree_8N: Any, probabilities_N: Any,
) -> Any:  # fmt: skip
    """The tree of the most likely nodes with the highest expected number of accepted symbols: rows 6 and 7 of tree_8N.

    A node has at most W children: with W = 1 it is a chain. N >= count. Returns the number of nodes.
    """
    found, best = np.int64(0), 0.0
    text_state = head[SUFFIX_STATE] if head[SIZE] == size else np.int64(NOTHING)  # known in the first automaton only
    for states, edges in ((states_0, edges_0), (states_1, edges_1), (states_2, edges_2)):
        state, length = match(states, edges, factor, text, size, max_length, text_state)
        text_state = np.int64(NOTHING)
        while state != ROOT:
            limit = np.int64(min(np.float64(max_length), max_factor * length))
            nodes, score = _best_first(
                states, edges, state, limit, count, min_probability, ranked_W, tree_8N, probabilities_N
            )
            if score > best:
                found, best = nodes, score
                for i in range(found):
                    tree_8N[BEST_TOKEN, i], tree_8N[BEST_PARENT, i] = tree_8N[NODE_TOKEN, i], tree_8N[NODE_PARENT, i]
            state = np.int64(states[state, LINK])
            length = np.int64(states[state, LENGTH])
    return found


@jit
def _best_first(
    states: Any, edges: Any, state: Any, limit: Any, count: Any, min_probability: Any,
    ranked_W: Any, tree_8N: Any, probabilities_N: Any,
) -> Any:  # fmt: skip
    """Build a tree: the number of its nodes, and the sum of their probabilities."""
    n, score, waiting = np.int64(0), 0.0, np.int64(0)
    parent, depth, probability = np.int64(ROOT_NODE), np.int64(0), 1.0
    while n < count:
        for i in range(_rank(states, edges, state, ranked_W) if depth < limit else 0):
            symbol, after = edges[ranked_W[i], SYMBOL], edges[ranked_W[i], TARGET]
            p = probability * (np.float64(states[after, COUNT]) / np.float64(states[state, CONTINUED]))
            if symbol != NOTHING and p >= min_probability:
                waiting = _insert(symbol, parent, after, depth + 1, p, waiting, count, tree_8N, probabilities_N)
        if waiting == 0:
            break
        tree_8N[NODE_TOKEN, n], tree_8N[NODE_PARENT, n] = tree_8N[TOKEN, 0], tree_8N[PARENT, 0]
        state, depth, probability = tree_8N[STATE, 0], tree_8N[DEPTH, 0], probabilities_N[0]
        parent, n, score, waiting = n, n + 1, score + probability, waiting - 1
        for i in range(waiting):
            _copy(i + 1, i, tree_8N, probabilities_N)
    return n, score


@jit
def _rank(states: Any, edges: Any, state: Any, ranked_W: Any) -> Any:
    """Find the W most frequent next symbols: their edges. Returns their number."""
    if len(ranked_W) == 1:
        ranked_W[0] = states[state, TOP]
        return 0 if ranked_W[0] == NOTHING else 1
    n, edge = 0, np.int64(states[state, FIRST])
    top = NOTHING if states[state, TOP] == NOTHING else edges[states[state, TOP], SYMBOL]
    while edge != NOTHING:
        i = n
        while i > 0 and _is_before(states, edges, top, edge, ranked_W[i - 1]):
            if i < len(ranked_W):
                ranked_W[i] = ranked_W[i - 1]
            i -= 1
        if i < len(ranked_W):
            ranked_W[i] = edge
        n = min(n + 1, len(ranked_W))
        edge = edges[edge, NEXT]
    return n


@jit
def _is_before(states: Any, edges: Any, top: Any, edge: Any, other: Any) -> Any:
    """The order of next symbols: by count, then the most frequent one in ``TOP``, then the highest id."""
    count, other_count = states[edges[edge, TARGET], COUNT], states[edges[other, TARGET], COUNT]
    symbol, other_symbol = edges[edge, SYMBOL], edges[other, SYMBOL]
    if count != other_count:
        return count > other_count
    return symbol == top or (other_symbol != top and symbol > other_symbol)


@jit
def _insert(
    token: Any, parent: Any, state: Any, depth: Any, probability: Any, n: Any, most: Any, tree_8N: Any, p_N: Any
) -> Any:  # fmt: skip
    """Insert a candidate after those of at least its probability. Returns the number of candidates, <= ``most``."""
    i = n
    while i > 0 and probability > p_N[i - 1]:
        if i < most:
            _copy(i - 1, i, tree_8N, p_N)
        i -= 1
    if i < most:
        tree_8N[TOKEN, i], tree_8N[PARENT, i], tree_8N[STATE, i], tree_8N[DEPTH, i] = token, parent, state, depth
        p_N[i] = probability
    return min(n + 1, most)


@jit
def _copy(i: Any, j: Any, tree_8N: Any, p_N: Any) -> None:
    p_N[j] = p_N[i]
    for row in range(DEPTH + 1):
        tree_8N[row, j] = tree_8N[row, i]


@kernel("int64(int64, int64, int64[::1], int64, int64, int64[::1])")
def draft_ngram(shortest: Any, longest: Any, text: Any, size: Any, count: Any, out: Any) -> Any:
    """Continue the most recent of the longest n-grams that equal the end of text[:size].

    n is ``shortest`` to ``longest``. out: the next ``count`` tokens; a continuation that reaches the end of the text
    repeats itself. Returns ``count``, or 0 without a match.
    """
    after, best = np.int64(0), shortest - 1
    for position in range(size - 1, 0, -1):
        if text[position - 1] == text[size - 1]:
            most, n = min(longest, position), np.int64(1)
            while n < most and text[position - n - 1] == text[size - n - 1]:
                n += 1
            if n > best:
                after, best = np.int64(position), n
                if n == longest:
                    break
    if after == 0:
        return 0
    for i in range(count):
        out[i] = text[after + i] if after + i < size else out[after + i - size]
    return count

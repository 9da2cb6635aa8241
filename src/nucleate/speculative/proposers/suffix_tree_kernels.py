"""Compiled suffix drafts that are trees. See ``suffix_draft_kernels``."""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.jit.compiler import jit, kernel
from nucleate.sampling.suffix_automaton import NOTHING, ROOT
from nucleate.speculative.draft import ROOT as ROOT_NODE
from nucleate.speculative.proposers.counting_automaton import (
    CONTINUED,
    COUNT,
    FIRST,
    LENGTH,
    LINK,
    NEXT,
    SIZE,
    SUFFIX_STATE,
    SYMBOL,
    TARGET,
    TOP,
)
from nucleate.speculative.proposers.suffix_draft_kernels import AUTOMATA, OPTIONS, match

TOKEN, PARENT, STATE, DEPTH, NODE_TOKEN, NODE_PARENT, BEST_TOKEN, BEST_PARENT = range(8)
"""The rows of the arrays of a tree: the candidates, most likely first; the nodes, and those of the best tree."""


@kernel(f"int64({AUTOMATA}, {OPTIONS}, int64[::1], int64[:, ::1], float64[::1])")
def draft_tree(
    head: Any, states_0: Any, edges_0: Any, states_1: Any, edges_1: Any, states_2: Any, edges_2: Any,
    factor: Any, text: Any, size: Any, count: Any, max_length: Any, max_factor: Any, min_probability: Any,
    ranked_W: Any, tree_8N: Any, probabilities_N: Any,
) -> Any:  # fmt: skip
    """The tree of the most likely nodes with the highest expected number of accepted symbols: rows 6 and 7 of tree_8N.

    A node has at most W children. N >= count. Returns the number of nodes.
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
    """Build a tree: the number of its nodes, and the sum of their probabilities. See ``tree.best_first``."""
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
    """Copy candidate i to place j."""
    p_N[j] = p_N[i]
    for row in range(DEPTH + 1):
        tree_8N[row, j] = tree_8N[row, i]

"""Repeats of a growing sequence: the indexes equal a brute-force search, and stay fast."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nucleate.sampling.suffix_automaton import RepeatIndex, WindowRepeatIndex, longest_repeats, repeat_lengths

SMALL = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), max_size=200))
EDGES = st.sampled_from([0, 1, 2, 3, 5, 50, 199, 200, 10**6])


def common(tokens, position):
    """The number of tokens before a position that equal the last tokens of the sequence."""
    length = 0
    while length < position and tokens[position - 1 - length] == tokens[len(tokens) - 1 - length]:
        length += 1
    return length


def continuations(tokens, least, most):
    """The tokens after earlier occurrences of the last n tokens, with the longest n, by brute force."""
    found = {}
    for position, token in enumerate(tokens):
        length = min(common(tokens, position), most)
        if length >= least:
            found[token] = max(found.get(token, 0), length)
    return found


@given(SMALL)
@example([])
@example([0])
@example([0, 0])
@example([0, 1] * 50)
@example([0] * 200)
def test_repeat_lengths_equal_brute_force(tokens):
    assert repeat_lengths(tokens) == [common(tokens, position) for position in range(len(tokens))]


def test_repeats_by_hand():
    assert repeat_lengths([1, 2, 3, 1, 2]) == [0, 0, 2, 0, 0]
    assert repeat_lengths([7, 7, 7]) == [0, 1, 2]
    assert RepeatIndex([1, 2, 3, 1, 2, 4, 1, 2], 1, 9).continuations(9) == {3: 2, 4: 2}
    assert RepeatIndex([1, 2, 3, 1, 2, 4, 1, 2], 0, 1).continuations(9) == {3: 1, 4: 1, 1: 0, 2: 0}
    assert WindowRepeatIndex([1, 2, 3, 1, 2], 4, 1, 9).continuations(9) == {3: 1}


@given(SMALL, EDGES, EDGES)
def test_longest_repeats_keeps_the_maximum_per_token(tokens, least, most):
    assert longest_repeats(tokens, repeat_lengths(tokens), least, most) == continuations(tokens, least, most)


@given(SMALL, st.integers(0, 200), EDGES, EDGES)
def test_the_index_equals_brute_force(tokens, start, least, most):
    """From any start, after every push (only the last few are checked, to limit the time)."""
    start = min(start, len(tokens))
    index = RepeatIndex(tokens[:start], least, most)
    for end in range(start, len(tokens) + 1):
        if end > start:
            index.push(tokens[end - 1])
        if len(tokens) - end < 12:
            prefix = tokens[:end]
            assert index.continuations(10**9) == continuations(prefix, least, most)
            assert index.continuations(2) == continuations(prefix, least, min(most, 2))
    assert RepeatIndex(tokens, least, most).continuations(3) == index.continuations(3)


@given(SMALL, st.integers(0, 200), st.sampled_from([0, 1, 2, 3, 4, 7, 31, 199, 200, 201, 10**9]), EDGES, EDGES)
def test_the_window_index_equals_brute_force_over_its_window(tokens, start, size, least, most):
    start = min(start, len(tokens))
    index = WindowRepeatIndex(tokens[:start], size, least, most)
    for end in range(start, len(tokens) + 1):
        if end > start:
            index.push(tokens[end - 1])
        if len(tokens) - end < 12 or end % 17 == 0:
            last = tokens[max(0, end - size) : end]
            assert index.continuations(10**9) == continuations(last, least, most)
            assert index.continuations(2) == continuations(last, least, min(most, 2))


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_a_window_stores_no_more_than_its_size(size):
    window = WindowRepeatIndex([1, 1], size, 0, 100)
    for _ in range(20):
        window.push(1)
    assert window.continuations(100) == ({1: size - 1} if size else {})
    assert len(window._tokens) == len(window._lengths) == size


def test_the_input_is_copied():
    tokens = [1, 2, 1]
    suffixes, window = RepeatIndex(tokens, 1, 9), WindowRepeatIndex(tokens, 3, 1, 9)
    suffixes.push(2)
    window.push(2)
    assert tokens == [1, 2, 1]
    tokens.append(9)
    assert suffixes.continuations(9) == {1: 2}
    assert window.continuations(9) == {1: 1}


@pytest.mark.parametrize("loop", [[5], [5, 6], [5, 5, 6]])
def test_a_token_costs_the_same_in_an_endless_loop(loop):
    """Every suffix of such a text has occurred before: tens of thousands of them."""
    index, most = RepeatIndex(loop * 20_000, 1, 160), 300
    start = time.thread_time()
    for turn in range(most):
        index.push(loop[turn % len(loop)])
        assert index.continuations(10**9)[loop[(turn + 1) % len(loop)]] == 160
    assert (time.thread_time() - start) / most < 5e-4


def test_leaving_a_loop_costs_no_more_than_the_longest_repeat():
    index = RepeatIndex([5, 6] + [5] * 20_000, 1, 160)  # only the shortest suffix was followed by 6
    start = time.thread_time()
    for _ in range(100):
        index.push(5)
        assert index.continuations(10**9) == {5: 160, 6: 1}
    assert (time.thread_time() - start) / 100 < 1e-3

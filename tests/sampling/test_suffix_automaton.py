"""Repeats of a growing sequence: the fast ones equal a look at everything, and stay fast."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nucleate.sampling.suffix_automaton import RepeatIndex, WindowRepeatIndex, longest_repeats, repeat_lengths

SMALL = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), max_size=200))
EDGES = st.sampled_from([0, 1, 2, 3, 5, 50, 199, 200, 10**6])


def common(tokens, place):
    """How many tokens before a place equal the last ones of all, one at a time."""
    length = 0
    while length < place and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
        length += 1
    return length


def continuations(tokens, least, most):
    """What came after earlier occurrences of the last n tokens, at the longest n, by trying every place."""
    found = {}
    for place, token in enumerate(tokens):
        length = min(common(tokens, place), most)
        if length >= least:
            found[token] = max(found.get(token, 0), length)
    return found


@given(SMALL)
@example([])
@example([0])
@example([0, 0])
@example([0, 1] * 50)
@example([0] * 200)
def test_repeats_are_those_that_are_there(tokens):
    assert repeat_lengths(tokens) == [common(tokens, place) for place in range(len(tokens))]


def test_repeats_by_hand():
    assert repeat_lengths([1, 2, 3, 1, 2]) == [0, 0, 2, 0, 0]
    assert repeat_lengths([7, 7, 7]) == [0, 1, 2]
    assert RepeatIndex([1, 2, 3, 1, 2, 4, 1, 2], 1, 9).continuations(9) == {3: 2, 4: 2}
    assert RepeatIndex([1, 2, 3, 1, 2, 4, 1, 2], 0, 1).continuations(9) == {3: 1, 4: 1, 1: 0, 2: 0}
    assert WindowRepeatIndex([1, 2, 3, 1, 2], 4, 1, 9).continuations(9) == {3: 1}


@given(SMALL, EDGES, EDGES)
def test_longest_takes_the_best_of_each_token(tokens, least, most):
    assert longest_repeats(tokens, repeat_lengths(tokens), least, most) == continuations(tokens, least, most)


@given(SMALL, st.integers(0, 200), EDGES, EDGES)
def test_suffixes_are_equal_to_a_look_at_everything(tokens, start, least, most):
    """Whatever was there at the start, after every push (of the last few, so that it takes no hour)."""
    start = min(start, len(tokens))
    grown = RepeatIndex(tokens[:start], least, most)
    for end in range(start, len(tokens) + 1):
        if end > start:
            grown.push(tokens[end - 1])
        if len(tokens) - end < 12:
            said = tokens[:end]
            assert grown.continuations(10**9) == continuations(said, least, most)
            assert grown.continuations(2) == continuations(said, least, min(most, 2))
    assert RepeatIndex(tokens, least, most).continuations(3) == grown.continuations(3)


@given(SMALL, st.integers(0, 200), st.sampled_from([0, 1, 2, 3, 4, 7, 31, 199, 200, 201, 10**9]), EDGES, EDGES)
def test_windows_are_equal_to_a_look_at_their_last_tokens(tokens, start, size, least, most):
    start = min(start, len(tokens))
    grown = WindowRepeatIndex(tokens[:start], size, least, most)
    for end in range(start, len(tokens) + 1):
        if end > start:
            grown.push(tokens[end - 1])
        if len(tokens) - end < 12 or end % 17 == 0:
            last = tokens[max(0, end - size) : end]
            assert grown.continuations(10**9) == continuations(last, least, most)
            assert grown.continuations(2) == continuations(last, least, min(most, 2))


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_a_window_holds_no_more_than_its_size(size):
    window = WindowRepeatIndex([1, 1], size, 0, 100)
    for _ in range(20):
        window.push(1)
    assert window.continuations(100) == ({1: size - 1} if size else {})
    assert len(window._tokens) == len(window._lengths) == size


def test_what_is_given_is_not_kept_and_not_changed():
    tokens = [1, 2, 1]
    suffixes, window = RepeatIndex(tokens, 1, 9), WindowRepeatIndex(tokens, 3, 1, 9)
    suffixes.push(2)
    window.push(2)
    assert tokens == [1, 2, 1]
    tokens.append(9)
    assert suffixes.continuations(9) == {1: 2}
    assert window.continuations(9) == {1: 1}


def text(length, seed=0):
    """Many different tokens, and passages that come again."""
    numbers, said = random.Random(seed), []
    while len(said) < length:
        start = numbers.randrange(len(said) + 1)
        said += said[start : start + 12] if numbers.random() < 0.1 else [numbers.randrange(5000) for _ in range(20)]
    return said[:length]


def cost(make, length, turns=300, tries=5):
    """Seconds per push and look, at the best of several tries, of a sequence with some length."""
    tokens, more = text(length), text(turns, 1)
    best = float("inf")
    grown = make(tokens)
    for _ in range(tries):
        start = time.thread_time()
        for token in more:
            grown.push(token)
            grown.continuations(10**9)
        best = min(best, time.thread_time() - start)
    return best / turns


def test_a_token_costs_the_same_after_a_long_text_as_after_a_short_one():
    def make(tokens):
        return RepeatIndex(tokens, 2, 160)

    assert cost(make, 100_000) < 8 * cost(make, 1000)


@pytest.mark.parametrize("loop", [[5], [5, 6], [5, 5, 6]])
def test_a_token_costs_no_more_in_a_loop_that_goes_on_for_ever(loop):
    """Every suffix of such a text has been there before: tens of thousands of them."""
    grown, most = RepeatIndex(loop * 20_000, 1, 160), 300
    start = time.thread_time()
    for turn in range(most):
        grown.push(loop[turn % len(loop)])
        assert grown.continuations(10**9)[loop[(turn + 1) % len(loop)]] == 160
    assert (time.thread_time() - start) / most < 5e-4


def test_a_loop_that_was_left_once_costs_no_more_than_the_longest_repeat():
    grown = RepeatIndex([5, 6] + [5] * 20_000, 1, 160)  # only the shortest suffix was followed by 6
    start = time.thread_time()
    for _ in range(100):
        grown.push(5)
        assert grown.continuations(10**9) == {5: 160, 6: 1}
    assert (time.thread_time() - start) / 100 < 1e-3


def test_a_token_costs_what_its_window_holds_and_no_more():
    def make(tokens):
        return WindowRepeatIndex(tokens, 500, 2, 160)

    assert cost(make, 100_000) < 6 * cost(make, 1000)


def test_one_token_for_ever_is_taken_in_at_once():
    start = time.thread_time()
    grown = RepeatIndex([5] * 20_000, 1, 10**9)
    window = WindowRepeatIndex([5] * 20_000, 20_000, 1, 10**9)
    assert grown.continuations(10**9) == window.continuations(10**9) == {5: 19_999}
    assert time.thread_time() - start < 1.5

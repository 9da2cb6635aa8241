"""Memory and what follows a row: equal to the whole history after every token, at a cost that does not grow with it."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.incremental_history import IncrementalHistory, TokenCounter
from nucleate.sampling.stage import History
from nucleate.sampling.stages import BadWords, Dry, Frequency, Gumbel, MinTokens, NoRepeatNgram, Presence, Repetition

WINDOWS = [None, -1, 0, 1, 2, 3, 7, 64, 10**6]
TEXTS = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), max_size=60))
WORD = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)
WORDS = st.lists(WORD, max_size=5).map(tuple)


def counted(tokens, prompt=()):
    return {t: (list(prompt).count(t), tokens.count(t)) for t in {*tokens, *prompt}}


def as_dict(counts):
    ids, *columns = (column.tolist() for column in counts)
    made = dict(zip(ids, zip(*columns, strict=True), strict=True))
    assert len(made) == len(ids)
    return made


@pytest.mark.parametrize("window", WINDOWS)
@given(prompt=TEXTS, output=TEXTS, more=TEXTS)
@pytest.mark.fast_cases(4)
def test_a_tally_counts_what_is_there_after_every_token(window, prompt, output, more):
    tally, said = TokenCounter(History(prompt, output), window), list(output)
    for token in [None, *more]:
        if token is not None:
            tally.push(token)
            said.append(token)
        both = [*prompt, *said]
        last = both if window == -1 else both[max(0, len(both) - (window or 0)) :]
        expected = counted(said, prompt) if window is None else counted(last)
        assert as_dict(tally.counts()) == as_dict(History(prompt, said).counts(window)) == expected
        assert all(column.dtype == np.int64 for column in tally.counts())


def test_a_tally_holds_no_more_tokens_than_its_window():
    tally = TokenCounter(History((), ()), 5)
    for token in range(1000):
        tally.push(token)
    assert as_dict(tally.counts()) == dict.fromkeys(range(995, 1000), (0, 1))
    assert len(tally._positions) == 5
    assert tally._columns.shape[1] < 32


def test_counts_that_were_given_away_are_as_they_were():
    """Of one step: a rule may not see the numbers change under it."""
    counts = History((1, 2), (2, 3)).counts(None)
    assert as_dict(counts) == {1: (1, 0), 2: (1, 1), 3: (0, 1)}


def assert_follows(stage, prompt, output, more):
    follower, said = stage.incremental_listing(History(prompt, output)), list(output)
    memory = IncrementalHistory((stage, Gumbel(0)), prompt, output)
    for token in [None, *more]:
        if token is not None:
            follower.push(token)
            memory.push(token)
            said.append(token)
        whole = dict(stage.listing(History(prompt, said)))
        assert dict(follower.listing()) == whole
        assert dict(memory.listing(stage)) == whole
    return whole


@given(TEXTS, TEXTS, TEXTS, WORDS, st.sampled_from([1, 2, 3, 9]), st.sampled_from([-1, 0, 1, 2, 3, 8, 50, 10**6]))
def test_dry_follows_a_row(prompt, output, more, breakers, allowed, last_n):
    assert_follows(Dry(0.8, 1.5, allowed, breakers, last_n), prompt, output, more)


@pytest.mark.parametrize(
    "breakers",
    [
        None,
        (),
        ((1,),),
        ((0, 1),),
        ((1, 1),),
        ((0, 1), (1, 0), (1,)),
        ((0, 1, 0), (1, 0)),
        ((1, 1, 1, 1), (1, 1)),
        ((9,),),
    ],
    ids=str,
)
@pytest.mark.parametrize("last_n", [-1, 0, 1, 4, 30])
def test_dry_with_every_kind_of_breaker_is_a_walk_by_hand(breakers, last_n):
    numbers = random.Random(repr(breakers))
    for turn in range(4):
        text = [numbers.choice((0, 1, 1, 0, 2)) for _ in range(50)]
        stage = Dry(1.0, 2.0, 1 + turn % 3, breakers, last_n)
        follower = stage.incremental_listing(History(text[:10], ()))
        for end in range(10, 51):
            if end > 10:
                follower.push(text[end - 1])
            assert dict(follower.listing()) == by_hand(text[:end], 1 + turn % 3, breakers or (), last_n)


def by_hand(said, allowed, breakers, last_n):
    """DRY as its definition says it: each earlier place, token by token, no further than the end of a breaker."""
    ends = [any(tuple(said[max(0, i - len(b) + 1) : i + 1]) == b for b in breakers) for i in range(len(said))]
    first = 0 if last_n < 0 else max(0, len(said) - last_n)
    lengths = {}
    for place in range(first, len(said)):
        n = 0
        while place - 1 - n >= first and said[place - 1 - n] == said[len(said) - 1 - n] and not ends[len(said) - 1 - n]:
            n += 1
        token = said[place]
        completes = any(b[-1] == token and tuple([*said, token][-len(b) :]) == b for b in breakers)
        if n >= allowed and not completes:
            lengths[token] = max(lengths.get(token, 0), n)
    return {token: -(2.0 ** (n - allowed)) for token, n in lengths.items()}


@given(TEXTS, TEXTS, TEXTS, st.sampled_from([1, 2, 3, 4, 10, 59, 10**6]))
def test_no_repeat_ngram_follows_a_row(prompt, output, more, n):
    listing = assert_follows(NoRepeatNgram(n), prompt, output, more)
    both = [*prompt, *output, *more]
    grams = {tuple(both[i : i + n]) for i in range(len(both) - n + 1)}
    banned = {token for token in range(5) if len(both) >= n - 1 and (*both[len(both) - n + 1 :], token) in grams}
    assert listing == dict.fromkeys(banned, -math.inf)


@given(TEXTS, TEXTS, WORDS)
def test_bad_words_follow_a_row(prompt, more, words):
    listing = assert_follows(BadWords(words), prompt, (), more)
    banned = {w[-1] for w in words if len(w) - 1 <= len(more) and tuple(more[len(more) - len(w) + 1 :]) == w[:-1]}
    assert listing == dict.fromkeys(banned, -math.inf)


def test_the_penalty_of_a_very_long_repeat_is_finite():
    for stage in (Dry(1e308, 1e308), Dry(5.0, 1.0), Dry(1e-300, 1.75), Dry(1.0, 1.0 + 2**-52), Dry(2.0, 1e308)):
        follower = stage.incremental_listing(History([3] * 5000, ()))
        listing = follower.listing()
        assert listing.keys() == {3}
        assert -math.exp(87.001) < listing[3] < 0 or stage.base == 1.0
        assert dict(listing) == dict(stage.listing(History([3] * 5000, ())))


@pytest.mark.parametrize(
    "stage", [BadWords(("a",)), Dry(1.0, breakers=("a",)), Dry(1.0, breakers=((1,), "b c"))], ids=repr
)
def test_text_needs_a_tokenizer(stage):
    with pytest.raises(ParameterError, match="no tokenizer"):
        stage.incremental_listing(History((1, 1), (1,)))
    with pytest.raises(ParameterError, match="no tokenizer"):
        stage.listing(History((1, 1), (1,)))
    with pytest.raises(ParameterError, match="no tokenizer"):
        IncrementalHistory((stage, Gumbel(0)), [1, 1], [1])


def test_a_memory_answers_for_every_window_of_its_stages_at_once():
    stages = (Repetition(2.0), Frequency(1.0, 3), Presence(1.0, -1), Frequency(0.5, 0), MinTokens(4, (9,)), Gumbel(0))
    prompt, said = [1, 2, 2], []
    memory = IncrementalHistory(stages, prompt)
    for token in [2, 5, 5, 1, 2, 9, 9, 9]:
        memory.push(token)
        said.append(token)
        for window in (None, 3, -1, 0):
            assert as_dict(memory.counts(window)) == as_dict(History(prompt, said).counts(window))
        assert memory.listing(stages[4]) == stages[4].listing(History(prompt, said))
    assert memory.output == said


def test_a_memory_is_not_changed_by_what_its_caller_does_later():
    prompt, output = [1, 2, 1], [2]
    memory = IncrementalHistory((Repetition(2.0), NoRepeatNgram(2), Gumbel(0)), prompt, output)
    prompt.append(7)
    output.append(8)
    assert (memory.prompt, memory.output) == ([1, 2, 1], [2])
    assert as_dict(memory.counts(None)) == {1: (2, 0), 2: (1, 1)}


LISTED = (
    *(Dry(0.8, breakers=((0,),)), Dry(0.5, last_n=300), NoRepeatNgram(3)),
    *(BadWords(tuple((i, i + 1) for i in range(200))), MinTokens(9, (1,))),
)


def text(length, seed=0):
    """Many different tokens, and passages that come again."""
    numbers, said = random.Random(seed), []
    while len(said) < length:
        start = numbers.randrange(len(said) + 1)
        said += said[start : start + 12] if numbers.random() < 0.1 else [numbers.randrange(5000) for _ in range(20)]
    return said[:length]


def cost(length, turns=200, tries=5):
    """Seconds per token and step, at the best of several tries, after a prompt of some length."""
    memory, best = IncrementalHistory((*LISTED, Gumbel(0)), text(length)), float("inf")
    for turn in range(tries):
        start = time.thread_time()
        for token in text(turns, turn + 1):
            memory.push(token)
            for stage in LISTED:
                memory.listing(stage)
        best = min(best, time.thread_time() - start)
    return best / turns


def test_a_step_costs_the_same_after_a_long_text_as_after_a_short_one():
    assert cost(100_000) < 6 * cost(1000)


def test_a_prompt_of_one_token_for_ever_is_admitted_at_once():
    sampler, start = nc.Sampler(10), time.thread_time()
    row = sampler.add((Dry(0.8), NoRepeatNgram(50), Repetition(1.1), Gumbel(1)), [5] * 20_000)
    token = sampler(np.zeros((1, 10), np.float32)).token_ids[0]
    assert time.thread_time() - start < 2.0
    assert token != 5
    assert sampler.output_ids(row) == (token,)

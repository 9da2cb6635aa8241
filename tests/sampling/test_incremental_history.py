"""Incremental history equals the full history after every token, at a constant cost per token."""

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
from nucleate.sampling.suffix_automaton import SuffixAutomaton

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
@pytest.mark.fast_cases(2)
def test_token_counts_are_correct_after_every_token(window, prompt, output, more):
    tally, history = TokenCounter(History(prompt, output), window), list(output)
    for token in [None, *more]:
        if token is not None:
            tally.push(token)
            history.append(token)
        both = [*prompt, *history]
        last = both if window == -1 else both[max(0, len(both) - (window or 0)) :]
        expected = counted(history, prompt) if window is None else counted(last)
        assert as_dict(tally.counts()) == as_dict(History(prompt, history).counts(window)) == expected
        assert all(column.dtype == np.int64 for column in tally.counts())


def test_token_counts_use_memory_bounded_by_the_window():
    tally = TokenCounter(History((), ()), 5)
    for token in range(1000):
        tally.push(token)
    assert as_dict(tally.counts()) == dict.fromkeys(range(995, 1000), (0, 1))
    assert len(tally._positions) == 5
    assert tally._columns.shape[1] < 32


def test_returned_counts_do_not_change_later():
    """Counts are a snapshot of one step: later tokens do not change them."""
    counts = History((1, 2), (2, 3)).counts(None)
    assert as_dict(counts) == {1: (1, 0), 2: (1, 1), 3: (0, 1)}


def assert_follows(stage, prompt, output, more):
    follower, history = stage.incremental_listing(History(prompt, output)), list(output)
    memory = IncrementalHistory((stage, Gumbel(0)), prompt, output)
    for token in [None, *more]:
        if token is not None:
            follower.push(token)
            memory.push(token)
            history.append(token)
        full_listing = dict(stage.listing(History(prompt, history)))
        assert dict(follower.listing()) == full_listing
        assert dict(memory.listing(stage)) == full_listing
    return full_listing


@given(TEXTS, TEXTS, TEXTS, WORDS, st.sampled_from([1, 2, 3, 9]), st.sampled_from([-1, 0, 1, 2, 3, 8, 50, 10**6]))
def test_dry_equals_the_full_listing(prompt, output, more, breakers, allowed, last_n):
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
def test_dry_with_every_kind_of_breaker_equals_the_definition(breakers, last_n):
    rng = random.Random(repr(breakers))
    for turn in range(4):
        text = [rng.choice((0, 1, 1, 0, 2)) for _ in range(50)]
        stage = Dry(1.0, 2.0, 1 + turn % 3, breakers, last_n)
        follower = stage.incremental_listing(History(text[:10], ()))
        for end in range(10, 51):
            if end > 10:
                follower.push(text[end - 1])
            assert dict(follower.listing()) == by_hand(text[:end], 1 + turn % 3, breakers or (), last_n)


def by_hand(history, allowed, breakers, last_n):
    """DRY by definition: compare each earlier position token by token, up to the end of a breaker."""
    ends = [any(tuple(history[max(0, i - len(b) + 1) : i + 1]) == b for b in breakers) for i in range(len(history))]
    first = 0 if last_n < 0 else max(0, len(history) - last_n)
    lengths = {}
    for position in range(first, len(history)):
        n = 0
        while (
            position - 1 - n >= first
            and history[position - 1 - n] == history[len(history) - 1 - n]
            and not ends[len(history) - 1 - n]
        ):
            n += 1
        token = history[position]
        completes = any(b[-1] == token and tuple([*history, token][-len(b) :]) == b for b in breakers)
        if n >= allowed and not completes:
            lengths[token] = max(lengths.get(token, 0), n)
    return {token: -(2.0 ** (n - allowed)) for token, n in lengths.items()}


@given(TEXTS, TEXTS, TEXTS, st.sampled_from([1, 2, 3, 4, 10, 59, 10**6]))
def test_no_repeat_ngram_equals_the_full_listing(prompt, output, more, n):
    listing = assert_follows(NoRepeatNgram(n), prompt, output, more)
    both = [*prompt, *output, *more]
    grams = {tuple(both[i : i + n]) for i in range(len(both) - n + 1)}
    banned = {token for token in range(5) if len(both) >= n - 1 and (*both[len(both) - n + 1 :], token) in grams}
    assert listing == dict.fromkeys(banned, -math.inf)


@given(TEXTS, TEXTS, WORDS)
def test_bad_words_equal_the_full_listing(prompt, more, words):
    listing = assert_follows(BadWords(words), prompt, (), more)
    banned = {w[-1] for w in words if len(w) - 1 <= len(more) and tuple(more[len(more) - len(w) + 1 :]) == w[:-1]}
    assert listing == dict.fromkeys(banned, -math.inf)


@pytest.mark.parametrize(
    "stage",
    [
        *(Dry(0.8, 1.5, 1, ((1,), (0, 2)), last_n) for last_n in (-1, 0, 4, 50)),
        *(NoRepeatNgram(1), NoRepeatNgram(3), BadWords(((1,), (0, 1), (2, 0, 1)))),
        *(Repetition(1.1), Frequency(0.1), Presence(0.1)),
    ],
    ids=repr,
)
@given(prompt=TEXTS, output=TEXTS, tails=st.lists(TEXTS, min_size=1, max_size=4), more=TEXTS)
@pytest.mark.fast_cases(6)
def test_forks_continue_on_their_own(stage, prompt, output, tails, more):
    """Each fork, and a fork of a fork, equals the history of its own tokens, whatever the others append meanwhile."""
    origin = IncrementalHistory((stage, Gumbel(0)), prompt, output)
    forks = [(origin.fork(), list(output), tail) for tail in tails]
    for place in range(max(map(len, tails))):
        for fork, tokens, tail in forks:
            if place < len(tail):
                fork.push(tail[place])
                tokens.append(tail[place])
            assert_equals(fork, stage, prompt, tokens)
    for fork, tokens, tail in forks:
        deeper = fork.fork()
        for token in (*more, *tail):
            deeper.push(token)
        assert_equals(deeper, stage, prompt, [*tokens, *more, *tail])
        assert_equals(fork, stage, prompt, tokens)
    assert_equals(origin, stage, prompt, output)


def assert_equals(memory, stage, prompt, output):
    expected = History(prompt, output)
    assert (memory.prompt, memory.output) == (prompt, output)
    assert dict(memory.listing(stage)) == expected.listing(stage)
    for window in (None, -1, 3):
        assert as_dict(memory.counts(window)) == as_dict(expected.counts(window))
        assert memory.table(window)[3] == len(expected.counts(window).ids_K)


@pytest.mark.slow
def test_rows_that_begin_alike_share_their_beginning(monkeypatch):
    """The n outputs of a request: the cost of the prompt is paid for two of them, not for each."""
    pushed = []
    push = SuffixAutomaton.push
    monkeypatch.setattr(SuffixAutomaton, "push", lambda self, token: (pushed.append(token), push(self, token))[1])
    rng = random.Random(1)
    prompt, stages = tuple(rng.choices(range(50), k=300)), (Dry(0.8, breakers=()), NoRepeatNgram(3), Gumbel(0))
    for ids in (prompt, list(prompt)):
        sampler = nc.Sampler(50, "reference")
        pushed.clear()
        rows = [sampler.add(stages, ids if ids is prompt else list(ids), seed=seed) for seed in range(20)]
        assert len(pushed) == 2 * 2 * len(prompt)
        alone = [nc.Sampler(50, "reference") for _ in rows]
        for seed, one in enumerate(alone):
            one.add(stages, list(prompt), seed=seed)
        for _ in range(8):
            logits = np.random.default_rng(len(pushed)).normal(size=(20, 50)).astype(np.float32)
            expected = [one(logits[i : i + 1]).token_ids[0] for i, one in enumerate(alone)]
            assert sampler(logits).token_ids.tolist() == expected
        other = sampler.add(stages, [*prompt[:-1], 7], output_ids=(1, 2))
        assert sampler.history(other).prompt[-1] == 7
        assert sampler.history(other).output == [1, 2]
        same = sampler.add((Dry(0.8, breakers=()), Gumbel(0)), [*prompt[:-1], 7], output_ids=(1, 2))
        assert sampler.history(same).output == [1, 2]


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


def test_a_history_does_not_share_memory_with_its_caller():
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
    """Many different tokens, with repeated passages."""
    rng, history = random.Random(seed), []
    while len(history) < length:
        start = rng.randrange(len(history) + 1)
        history += history[start : start + 12] if rng.random() < 0.1 else [rng.randrange(5000) for _ in range(20)]
    return history[:length]


def cost(length, turns=200, tries=5):
    """Seconds per token and step, as the best of several runs, after a prompt of some length."""
    memory, best = IncrementalHistory((*LISTED, Gumbel(0)), text(length)), float("inf")
    for turn in range(tries):
        start = time.thread_time()
        for token in text(turns, turn + 1):
            memory.push(token)
            for stage in LISTED:
                memory.listing(stage)
        best = min(best, time.thread_time() - start)
    return best / turns


@pytest.mark.slow
def test_a_step_costs_the_same_after_a_long_text_as_after_a_short_one():
    assert cost(100_000) < 6 * cost(1000)


def test_a_long_prompt_of_one_token_is_indexed_quickly():
    sampler, start = nc.Sampler(10), time.thread_time()
    row = sampler.add((Dry(0.8), NoRepeatNgram(50), Repetition(1.1), Gumbel(1)), [5] * 20_000)
    token = sampler(np.zeros((1, 10), np.float32)).token_ids[0]
    assert time.thread_time() - start < 2.0
    assert token != 5
    assert sampler.output_ids(row) == (token,)

"""The compiled n-gram and suffix drafts equal those in plain Python, token for token."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import tiers
from lookup_twins import PlainNgramProposer, PlainSuffixProposer

from nucleate.speculative.draft import Draft, DraftContext, Proposer
from nucleate.speculative.ngram import NgramProposer
from nucleate.speculative.suffix import CountingAutomaton, SuffixProposer


def fibonacci(length: int) -> list[int]:
    before, word = [0], [0, 1]
    while len(word) < length:
        before, word = word, word + before
    return word[:length]


def records(length: int, rng: random.Random) -> list[int]:
    """Text with passages that repeat with small changes."""
    text: list[int] = []
    while len(text) < length:
        start = rng.randrange(len(text) + 1)
        text += text[start : start + rng.randrange(30)] + [rng.randrange(50) for _ in range(rng.randrange(4))]
    return text[:length]


TEXTS: dict[str, Callable[[int, random.Random], list[int]]] = {
    "one token": lambda length, rng: [7] * length,
    "two tokens": lambda length, rng: [rng.randrange(2) for _ in range(length)],
    "alternating": lambda length, rng: [5, 6] * (length // 2),
    "fibonacci": lambda length, rng: fibonacci(length),
    "unique": lambda length, rng: list(range(length)),
    "periods": lambda length, rng: list(range(37)) * (length // 37),
    "records": records,
    "one token between others": lambda length, rng: [each for i in range(length // 2) for each in (3, i)],
    "huge ids": lambda length, rng: [rng.choice((2**31 - 1, 2**31, 2**62, 2**63 - 1, 0)) for _ in range(length)],
    "separators": lambda length, rng: [rng.choice((-1, 1, 2)) for _ in range(length)],
    "multiples": lambda length, rng: [2**20 * rng.randrange(40) for _ in range(length)],
}
SUFFIX_OPTIONS = [
    {},
    {"max_suffix_length": 3, "max_spec_factor": 2.5, "min_probability": 0.0},
    {"max_suffix_length": 5, "max_spec_factor": float(10**9), "min_probability": 0.3, "max_cached_tokens": 150},
    {"max_cached_tokens": 0, "index_chunk_size": 5},
    {"tree_width": 3},
    {"tree_width": 64, "min_probability": 0.0, "max_spec_factor": 3.0, "max_cached_tokens": 300},
    {"tree_width": 2, "index_chunk_size": 9, "max_suffix_length": 4},
]
NGRAM_OPTIONS = [{}, {"prompt_lookup_max": 1, "prompt_lookup_min": 1}, {"prompt_lookup_max": 9}]
PAIRS = [
    *((SuffixProposer, PlainSuffixProposer, options) for options in SUFFIX_OPTIONS),
    *((NgramProposer, PlainNgramProposer, options) for options in NGRAM_OPTIONS),
]


def assert_equal(found: list[Draft], expected: list[Draft]) -> None:
    assert [(draft.tokens, draft.parents) for draft in found] == [(draft.tokens, draft.parents) for draft in expected]


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].__name__} {pair[2]}")
def test_drafts_equal_those_in_plain_python(kind: str, pair: tuple[type, type, dict[str, float]]) -> None:
    """Sequences that grow, end, are learned, become shorter, and are drafted for with others."""
    fast, plain, options = pair
    proposers: list[Proposer] = [fast(**options), plain(**options)]
    rng = random.Random(0)
    sequences: dict[int, list[int]] = {}
    texts: dict[int, list[int]] = {}
    for step in range(tiers.count(60, 400)):
        key = rng.randrange(4)
        action = rng.random()
        if key not in sequences:
            texts[key] = TEXTS[kind](300, random.Random(step))
            sequences[key] = texts[key][: rng.randrange(100)]
        elif action < 0.1 or len(sequences[key]) == len(texts[key]):
            output = sequences.pop(key)[rng.randrange(20) :]
            for proposer in proposers:
                proposer.forget(key, output)
        elif action < 0.15:
            del sequences[key][rng.randrange(len(sequences[key]) + 1) :]
        else:
            end = len(sequences[key])
            sequences[key] += texts[key][end : end + rng.choice((1, 1, 2, 5, 40))]
        chosen = [each for each in sequences if rng.random() < 0.7]
        counts = [rng.choice((0, 1, 4, 7, 64)) for _ in chosen]
        contexts = [DraftContext(each, sequences[each]) for each in chosen]
        assert_equal(*[proposer.propose(contexts, counts) for proposer in proposers])


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[4], PAIRS[7]], ids=["suffix", "tree", "ngram"])
@pytest.mark.parametrize("kind", ["records", "unique", "two tokens"])
def test_long_texts(kind: str, pair: tuple[type, type, dict[str, float]]) -> None:
    fast, plain, options = pair
    proposers = [fast(**options), plain(**options)]
    text = TEXTS[kind](5000, random.Random(1))
    for end in (*range(0, 5000, 397), 5000):
        context = DraftContext(0, text[:end])
        assert_equal(*[proposer.propose([context], [8]) for proposer in proposers])


def test_ids_that_are_no_int64_are_an_error() -> None:
    for proposer in (NgramProposer(), SuffixProposer()):
        with pytest.raises(OverflowError):
            proposer.propose([DraftContext(0, [1, 2**63])], [4])
        [draft] = proposer.propose([DraftContext(0, [1, 2, 3, 1, 2])], [1])  # the proposer still works
        assert draft.tokens == (3,)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_an_automaton_does_not_depend_on_how_it_grew(step: int) -> None:
    symbols = np.array(records(700, random.Random(2)), np.int64)
    automata = CountingAutomaton(8), CountingAutomaton(8)
    automata[0].extend(symbols, 0, len(symbols))
    for start in range(0, len(symbols), step):
        automata[1].extend(symbols, start, min(start + step, len(symbols)))
    assert automata[0].head.tolist() == automata[1].head.tolist()
    assert (automata[0].states[:, :4] == automata[1].states[:, :4]).all()
    edges = [sorted(each.edges[:, :3].tolist()) for each in automata]
    assert edges[0] == edges[1]

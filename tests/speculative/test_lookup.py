"""N-gram and suffix drafts equal those of a search of the whole text, token for token; their caches and costs."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_proposers import draft_of

from nucleate.sampling.suffix_automaton import NOTHING
from nucleate.speculative.draft import Draft, DraftContext, Proposer
from nucleate.speculative.ngram import NgramProposer
from nucleate.speculative.suffix import (
    CONTINUED,
    COUNT,
    MAX_CACHED_TOKENS,
    NUM_STATES,
    SYMBOL,
    CountingAutomaton,
    RecentOutputs,
    SuffixProposer,
)

TEXTS = st.integers(1, 3).flatmap(lambda size: st.lists(st.integers(0, size), max_size=40))


def proposers() -> list[Proposer]:
    return [NgramProposer(), SuffixProposer()]


# the reference


class Search:
    """Drafts for the same calls as a proposer with these options, found by searching whole texts."""

    def __init__(self, proposer: Proposer, max_cached_tokens: int = MAX_CACHED_TOKENS) -> None:
        self.options, self.half, self.indexed = proposer, max_cached_tokens // 2, dict[int, int]()
        self.young, self.old = list[int](), list[int]()

    def propose(self, contexts: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        return [self.draft(context.key, [*context.token_ids], k) for context, k in zip(contexts, counts, strict=True)]

    def draft(self, key: int, ids: list[int], count: int) -> Draft:
        if isinstance(self.options, NgramProposer):
            return Draft(tuple(ngram_draft(ids, len(ids), count, self.options)))
        indexed = self.indexed.get(key, 0)
        indexed = min(len(ids), (indexed if indexed <= len(ids) else 0) + self.options.index_chunk_size)
        self.indexed[key] = indexed
        best, best_score = list[tuple[int, int]](), 0.0
        for text in (ids[:indexed], self.young, self.old):
            for length, after in repeats(text, ids, self.options.max_suffix_length):
                limit = min(self.options.max_suffix_length, int(self.options.max_spec_factor * length))
                nodes, score = likely_nodes(text, after, limit, count, self.options)
                if score > best_score:
                    best, best_score = nodes, score
        tokens, parents = [token for token, _ in best], [parent for _, parent in best]
        return Draft(tuple(tokens)) if self.options.tree_width == 1 else Draft(tuple(tokens), tuple(parents))

    def forget(self, key: int, output: Sequence[int] = ()) -> None:
        self.indexed.pop(key, None)
        self.learn(output)

    def learn(self, output: Sequence[int]) -> None:
        stored = [*output][max(0, len(output) - self.half + 1) :] if self.half > 1 else []
        if stored and len(self.young) + len(stored) >= self.half:
            self.young, self.old = [], self.young
        self.young += [*stored, NOTHING] if stored else []


def ngram_draft(ids: list[int], indexed: int, count: int, options: NgramProposer) -> list[int]:
    for n in range(options.prompt_lookup_max, options.prompt_lookup_min - 1, -1):
        for index in range(indexed - 1, n - 1, -1):
            if ids[index - n : index] == ids[len(ids) - n :]:
                text = list(ids)
                for position in range(index, index + count):
                    text.append(text[position])
                return text[len(ids) :]
    return []


def repeats(text: list[int], ids: list[int], longest: int) -> Iterator[tuple[int, list[int]]]:
    """The lengths of the suffixes of ``ids`` that occur in the text, longest first, and the positions after them."""
    found, after = [], [*range(1, len(text) + 1)]
    for length in range(1, min(longest, len(ids)) + 1):
        after = [end for end in after if end >= length and text[end - length] == ids[-length]]
        found.append((length, after))
    yield from ((length, after) for length, after in reversed(found) if after)


def likely_nodes(
    text: list[int], after: list[int], max_depth: int, count: int, options: SuffixProposer
) -> tuple[list[tuple[int, int]], float]:
    """The most likely nodes (token, parent) after some positions, and the sum of their probabilities."""
    nodes, score, probability, depth = list[tuple[int, int]](), 0.0, 1.0, 0
    candidates: list[tuple[float, int, int, list[int], int]] = []
    while len(nodes) < count:
        ends: dict[int, list[int]] = {}
        for position in after:
            if position < len(text):
                ends.setdefault(text[position], []).append(position + 1)
        total = sum(len(positions) for positions in ends.values())
        top = max(ends, key=lambda token: (len(ends[token]), ends[token][-1]), default=NOTHING)
        ranked = heapq.nlargest(options.tree_width, ends, key=lambda token: (len(ends[token]), token == top, token))
        for token in ranked if depth < max_depth else ():
            chance = probability * (len(ends[token]) / total)
            if token != NOTHING and chance >= options.min_probability:
                candidates.append((chance, token, len(nodes) - 1, ends[token], depth + 1))
        if not candidates:
            break
        best = max(candidates, key=lambda candidate: candidate[0])  # of equally likely ones, the first one found
        candidates.remove(best)
        probability, token, parent, after, depth = best
        nodes.append((token, parent))
        score += probability
    return nodes, score


def assert_equal(found: list[Draft], expected: list[Draft]) -> None:
    assert [(draft.tokens, draft.parents) for draft in found] == [(draft.tokens, draft.parents) for draft in expected]


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


KINDS: dict[str, Callable[[int, random.Random], list[int]]] = {
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
WAYS = [
    *((SuffixProposer, options) for options in SUFFIX_OPTIONS),
    *((NgramProposer, options) for options in NGRAM_OPTIONS),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("make", "options"), WAYS)
def test_drafts_equal_those_of_a_search(kind: str, make: Callable[..., Proposer], options: dict[str, float]) -> None:
    """Sequences that grow, end, are learned, become shorter, and are drafted for with others."""
    fast = make(**options)
    proposers = [fast, Search(fast, int(options.get("max_cached_tokens", MAX_CACHED_TOKENS)))]
    rng = random.Random(0)
    sequences: dict[int, list[int]] = {}
    texts: dict[int, list[int]] = {}
    for step in range(tiers.count(40, 100)):
        key = rng.randrange(4)
        action = rng.random()
        if key not in sequences:
            texts[key] = KINDS[kind](200, random.Random(step))
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


@pytest.mark.parametrize(("make", "options"), [WAYS[0], WAYS[4], WAYS[7]], ids=["suffix", "tree", "ngram"])
@pytest.mark.parametrize("kind", ["records", "unique", "two tokens"])
def test_long_texts(kind: str, make: Callable[..., Proposer], options: dict[str, float]) -> None:
    fast = make(**options)
    proposers = [fast, Search(fast)]
    text = KINDS[kind](5000, random.Random(1))
    for end in (*range(0, 5000, 397), 5000):
        context = DraftContext(0, text[:end])
        assert_equal(*[proposer.propose([context], [8]) for proposer in proposers])


@given(TEXTS, st.integers(0, 7), st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_any_ngram_draft_equals_that_of_a_search(ids, k, shortest, more, step):
    proposer = NgramProposer(shortest + more, shortest)
    for end in [*range(0, len(ids), step), len(ids)]:
        found = draft_of(proposer, DraftContext(3, ids[:end]), k)
        assert_equal([found], [Search(proposer).draft(3, ids[:end], k)])
        assert found.distributions is None


@settings(max_examples=tiers.count(15, 60))
@given(st.lists(TEXTS, max_size=6), TEXTS, st.integers(2, 90), st.integers(1, 5), st.sampled_from([0.4, 1.0, 2.5]))
def test_any_suffix_draft_equals_that_of_a_search(outputs, ids, remembered, longest, factor):
    proposer = SuffixProposer(longest, factor, max_cached_tokens=remembered)
    search = Search(proposer, remembered)
    for key, output in enumerate(outputs):
        for each in (proposer, search):
            each.learn(output) if key % 2 else each.forget(key, output)
        assert max(len(search.young), len(search.old)) <= remembered // 2
    for end in range(len(ids) + 1):
        assert_equal(*[each.propose([DraftContext(99, ids[:end])], [5]) for each in (proposer, search)])


@pytest.mark.parametrize(
    ("ids", "count", "tokens"),
    [
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], 2, (4, 1)),  # the most recent
        ([8, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 2, (3, 9)),  # but the longest first
        ([1, 2, 1, 2, 1], 5, (2, 1, 2, 1, 2)),  # a repeating text continues
        ([1, 2, 3, 2], 5, ()),
    ],
)
def test_ngram_examples(ids, count, tokens):
    assert draft_of(NgramProposer(3, 2), DraftContext(0, ids), count).tokens == tokens


def edges_of(automaton):
    """{(state, symbol): state after it}."""
    return {(source, symbol): target for symbol, source, target, _ in automaton.edges.tolist() if target}


@given(TEXTS, st.integers(1, 6))
def test_automaton_counts(ids, depth):
    automaton = CountingAutomaton(depth)
    automaton.extend(np.array(ids, np.int64), 0, len(ids))
    assert automaton.head[NUM_STATES] <= max(2, 2 * len(ids))
    edges, chunks = (
        edges_of(automaton),
        {tuple(ids[i:j]) for j in range(len(ids) + 1) for i in range(max(0, j - depth), j)},
    )
    assert len(edges) <= 3 * len(ids)
    for chunk in chunks:
        indices = [i for i in range(len(ids)) if tuple(ids[i : i + len(chunk)]) == chunk]
        state = 0
        for symbol in chunk:
            state = edges[state, symbol]
        assert automaton.states[state, COUNT] == len(indices)
        if len(chunk) < depth:
            assert automaton.states[state, CONTINUED] == sum(index + len(chunk) < len(ids) for index in indices)


RARE = [5, *itertools.chain.from_iterable((token, 5) for token in range(10, 21))]


@pytest.mark.parametrize(
    ("ids", "factor", "tokens"),
    [
        ([1, 2, 3, 4, 1, 2], 1, (3, 4)),  # not longer than the repeat
        ([1, 2, 3, 4, 1, 2], 2, (3, 4, 1, 2)),
        ([1, 7, 1, 7, 1, 8, 1], 1, (7,)),  # the most frequent, not the latest
        ([1, 7, 1, 8, 1], 1, (8,)),  # the latest of equally frequent ones
        ([5, 6], 1, ()),
        (RARE, 1, ()),  # each followed once in eleven occurrences
    ],
)
def test_suffix_examples(ids, factor, tokens):
    assert draft_of(SuffixProposer(max_spec_factor=factor), DraftContext(0, ids), 5).tokens == tokens


def test_suffixes_of_finished_outputs():
    proposer = SuffixProposer()
    proposer.forget(4, [5, 6, 7, 8, 9])
    assert draft_of(proposer, DraftContext(5, [5, 6]), 5).tokens == (7, 8)
    assert draft_of(proposer, DraftContext(5, [5, 6, 7, 8, 9]), 5).tokens == ()  # the output ended there
    proposer.learn([1, 2, 3, 4])  # ties prefer the sequence's own text:
    assert draft_of(proposer, DraftContext(6, [1, 2, 9, 8, 1, 2]), 5).tokens == (9, 8)


def test_old_outputs_are_evicted():
    generations = RecentOutputs(8, 400)

    def symbols():
        return {*generations.newer.edges[:, SYMBOL].tolist(), *generations.older.edges[:, SYMBOL].tolist()}

    for number in range(300):
        generations.add([1000 * number + i for i in range(1, 31)])
        assert generations.newer.size < 200
        assert generations.older.size < 200
    starts = {number for number in range(300) if 1000 * number + 1 in symbols()}
    assert len(starts) >= 400 // 31 // 2
    assert starts == set(range(300 - len(starts), 300))
    generations.add(list(range(10**6, 10**6 + 5000)))  # only the end of an output that is too long
    assert {10**6 + 4999, 10**6 + 4801} < symbols()
    assert 10**6 + 4800 not in symbols()
    for nothing in (0, 1, 3):
        small = RecentOutputs(8, nothing)
        small.add([1, 2, 3])
        assert small.newer.size == 0


def test_the_memory_of_cached_outputs_is_limited():
    generations = RecentOutputs(32, MAX_CACHED_TOKENS)
    for start in range(0, 100_000, 100):
        generations.add(range(start, start + 100))
    assert generations.older.size > 30_000
    assert sum(array.nbytes for array in generations.arrays) <= 12_000_000


def test_long_prompts_are_indexed_in_chunks():
    ids = [3, 1, 4, 1, 5, 9, 2, 6] * 3
    proposer = SuffixProposer(index_chunk_size=10)
    found = [draft_of(proposer, DraftContext(0, ids), 4).tokens for _ in range(3)]
    assert found == [(3, 1), (3, 1, 4, 1), (3, 1, 4, 1)]


@pytest.mark.parametrize("number", [0, 1])
def test_empty_forgotten_and_shortened_sequences(number):
    proposer = proposers()[number]
    assert draft_of(proposer, DraftContext(0, []), 4).tokens == ()
    assert draft_of(proposer, DraftContext(0, [7]), 4).tokens == ()
    assert draft_of(proposer, DraftContext(0, [7, 7, 7]), 0).tokens == ()
    ids = [1, 2, 3, 1, 2]
    assert draft_of(proposer, DraftContext(1, ids), 1).tokens == (3,)
    assert draft_of(proposer, DraftContext(2, [9, 1, 2]), 1).tokens == ()  # the text of another sequence
    proposer.accepted(1, 1)
    assert draft_of(proposer, DraftContext(1, [8, 8, 8]), 1).tokens == (8,)  # shorter than before: another text
    for key in (0, 1, 2, 1, 77):
        proposer.forget(key)
    assert draft_of(proposer, DraftContext(1, [1, 2]), 1).tokens == ()


def test_numpy_ids_give_integers():
    for proposer in proposers():
        tokens = draft_of(proposer, DraftContext(0, np.array([1, 2, 3, 1, 2])), 1).tokens
        assert tokens == (3,)
        assert type(tokens[0]) is int


@pytest.mark.parametrize(
    ("proposer", "options"),
    [
        *((NgramProposer, {name: 0}) for name in ("prompt_lookup_max", "prompt_lookup_min")),
        (NgramProposer, {"prompt_lookup_max": 1}),
        *((SuffixProposer, {name: 0}) for name in ("max_suffix_length", "max_spec_factor", "index_chunk_size")),
        (SuffixProposer, {"max_spec_factor": float("nan")}),
        (SuffixProposer, {"min_probability": 1.1}),
        (SuffixProposer, {"max_cached_tokens": -1}),
        (SuffixProposer, {"tree_width": 0}),
    ],
)
def test_invalid_options(proposer, options):
    with pytest.raises(ValueError, match="must be"):
        proposer(**options)


@pytest.mark.parametrize("ids", [[1] * 100_000, [1, 2] * 50_000, list(range(60_000))], ids=["a", "ab", "all"])
@pytest.mark.fast_cases(1)
def test_the_cost_of_a_token_does_not_grow(ids):
    proposer = SuffixProposer(8, index_chunk_size=1000)
    times = []
    for _ in range(0, len(ids), 1000):
        begin = time.process_time()
        draft_of(proposer, DraftContext(0, ids), 8)
        times.append(time.process_time() - begin)
    tenth = len(times) // 10
    assert np.median(times[-tenth:]) < 4 * np.median(times[:tenth]) + 0.01
    repeats = ids[0] == ids[2]
    assert draft_of(proposer, DraftContext(0, ids), 8).tokens == (tuple((ids * 2)[len(ids) :][:8]) if repeats else ())


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

"""Drafts, distributions, and the n-gram and suffix proposers against slow reference implementations."""

from __future__ import annotations

import functools
import itertools
import random
import time

import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_twins import PlainNgramProposer
from scripted_proposers import draft_of

from nucleate.sampling.suffix_automaton import NOTHING
from nucleate.speculative.draft import (
    ROOT,
    Draft,
    DraftContext,
    Proposer,
    exclude_token,
    normalize,
    sample_inverse_cdf,
    sample_without_replacement,
    select_nodes,
    truncate,
)
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


# distributions


@pytest.mark.parametrize(
    "weights", [[np.nan, 1], [np.inf, 1], [-1, 2], [0, 0], [], [1e308, 1e308], [-0.5, 0.5], [np.inf, -np.inf]]
)
def test_invalid_distributions(weights):
    assert normalize(weights) is None


def test_normalize_returns_a_copy_that_sums_to_one():
    weights = np.array([1, 3], np.float32)
    distribution = normalize(weights)
    weights[:] = 0
    assert distribution.tolist() == [0.25, 0.75]
    assert normalize([5.0]).tolist() == [1.0]
    with pytest.raises(ValueError, match="shape"):
        normalize([[1.0]])


@given(st.lists(st.sampled_from([0.0, 1e-300, 1e-9, 0.1, 1.0, 7.0]), min_size=1).filter(any), st.floats(0, 1))
def test_sampled_tokens_have_positive_weight(weights, u):
    token = sample_inverse_cdf(np.array(weights), u)
    assert weights[token] > 0
    below = sum(weights[:token])
    assert below <= u * sum(weights) * (1 + 1e-12) <= (below + weights[token]) * (1 + 1e-12) ** 2


def test_inverse_cdf_at_its_bounds():
    distribution = np.array([0.0, 0.25, 0.5, 0.25, 0.0])
    found = [sample_inverse_cdf(distribution, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53, 1.0)]
    assert found == [1, 1, 2, 2, 3, 3, 3]
    tenths = np.append(np.full(10, 0.1), 0.0)  # their sum is below 1
    assert sample_inverse_cdf(tenths, 1.0) == 9


def test_siblings_are_sampled_without_replacement():
    distribution = np.array([0.5, 0.0, 0.3, 0.2])
    tokens, distributions = sample_without_replacement(distribution, [0.6, 0.0, 0.9, 0.5])
    assert tokens == (2, 0, 3)
    assert np.allclose(distributions, [distribution, [5 / 7, 0, 0, 2 / 7], [0, 0, 0, 1]])
    assert exclude_token(np.array([0.0, 1.0]), 1) is None
    uniforms = np.random.default_rng(7).random((4000, 2))
    share = np.mean([sample_without_replacement(distribution, pair)[0] == (0, 2) for pair in uniforms])
    assert share == pytest.approx(0.5 * 0.6, abs=0.04)


# the value


def test_draft_properties():
    tree = Draft((5, 6, 7, 8), (ROOT, ROOT, 0, 2), (None, np.ones(9) / 9, None, None))
    assert tree.children() == {ROOT: [0, 1], 0: [2], 2: [3]}
    assert tree.parents is not None
    assert tree.distribution(0) is None
    assert tree.distribution(1)[3] == 1 / 9
    assert len(tree) == 4
    assert tree.prefix(9) is tree
    assert (tree.prefix(2).tokens, tree.prefix(2).parents) == ((5, 6), (ROOT, ROOT))
    assert len(tree.prefix(2).distributions) == 2
    assert tree.prefix(0).tokens == tree.prefix(-1).tokens == ()
    chain = Draft((5, 6))
    assert chain.children() == Draft((5, 6), (ROOT, 0)).children() == {ROOT: [0], 0: [1]}
    assert chain.parents is None
    assert Draft((5, 6), (ROOT, 0)).parents is None
    assert chain.prefix(1).tokens == (5,)
    assert chain.distribution(1) is None
    assert not Draft().children()


@pytest.mark.parametrize(
    ("tokens", "parents", "distributions"),
    [
        ((1,), (0,), None),
        ((1,), (-2,), None),
        ((1, 2), (ROOT, 1), None),
        ((1,), (), None),
        ((1,), None, ()),
        ((), None, (None,)),
    ],
)
def test_invalid_drafts(tokens, parents, distributions):
    with pytest.raises(ValueError, match=r"draft of|parent of"):
        Draft(tokens, parents, distributions)


def test_draft_context_position():
    assert DraftContext(1, [4, 5, 6], 2).position == 1


def random_tree(rng, count, sampled=False):
    parents = tuple(rng.randrange(-1, index) if index else -1 for index in range(count))
    distributions = tuple(rng.choice((None, np.ones(5))) for _ in range(count)) if sampled else None
    return Draft(tuple(rng.randrange(5) for _ in range(count)), parents, distributions)


@pytest.mark.parametrize("seed", range(20))
def test_tree_indices(seed):
    rng = random.Random(seed)
    draft = random_tree(rng, rng.randint(0, 12))
    depths = draft.depths()
    for index, parent in enumerate(draft.parent_indices()):
        path = draft.path(index)
        assert path[-1] == index
        assert len(path) == depths[index] + 1
        assert [*path[:-1]] == draft.path(parent)
    assert draft.depth == max((len(draft.path(index)) for index in range(len(draft))), default=0)
    assert draft.path(ROOT) == []


@pytest.mark.parametrize("seed", range(40))
def test_truncate_a_tree(seed):
    """Keeps the first siblings up to a depth, and the first ``count`` of those, by node index."""
    rng = random.Random(seed)
    draft = random_tree(rng, rng.randint(0, 14), sampled=rng.random() < 0.5)
    branches, depth, count = rng.randint(1, 4), rng.randint(0, 6), rng.randint(0, 14)
    found = truncate(draft, branches, depth, count)
    expected: list[int] = []
    for index, parent in enumerate(draft.parent_indices()):
        older = [each for each in draft.children()[parent] if each < index]
        if len(older) < branches and len(draft.path(index)) <= depth and set(draft.path(index)[:-1]) <= set(expected):
            expected.append(index)
    expected = expected[:count]
    assert found.tokens == tuple(draft.tokens[index] for index in expected)
    for at, index in enumerate(expected):
        assert [found.tokens[each] for each in found.path(at)] == [draft.tokens[each] for each in draft.path(index)]
        assert found.distribution(at) is draft.distribution(index)
    assert max((len(more) for more in found.children().values()), default=0) <= branches
    assert found.depth <= depth


@pytest.mark.parametrize("parents", [None, (ROOT, 0, 1, 2, 3)])
@pytest.mark.parametrize(("depth", "count"), [(2, 4), (4, 2), (0, 3), (3, 0), (9, 9)])
def test_truncate_a_chain(parents, depth, count):
    found = truncate(Draft((1, 2, 3, 4, 5), parents), 1, depth, count)
    assert found.tokens == (1, 2, 3, 4, 5)[: min(depth, count)]
    assert found.parents is None
    assert truncate(found, 1, 9, 9) is found


def test_select_all_nodes():
    tree = Draft((1, 2, 3), (ROOT, ROOT, 0))
    assert select_nodes(tree, [0, 1, 2]) is tree
    assert select_nodes(Draft((1, 2), (ROOT, 0)), [0, 1]).parents is None
    assert select_nodes(tree, [0, 2]).parents is None


# n-grams


@given(TEXTS, st.integers(0, 7), st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_ngram_proposer_equals_its_reference(ids, k, shortest, more, step):
    proposers = [kind(shortest + more, shortest) for kind in (NgramProposer, PlainNgramProposer)]
    for end in [*range(0, len(ids), step), len(ids)]:
        found, expected = (draft_of(proposer, DraftContext(3, ids[:end]), k) for proposer in proposers)
        assert found.tokens == expected.tokens
        assert found.parents is None
        assert found.distributions is None


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


# suffixes


def continuation(text, end, most, least):
    """Reference implementation of the automaton's continuation: symbols and score."""
    tokens, score, chance = [], 0.0, 1.0
    while len(tokens) < most:
        chunk = end + tokens
        after = [text[i + len(chunk)] for i in range(len(text) - len(chunk)) if text[i : i + len(chunk)] == chunk]
        if not after:
            break
        token = max(
            after, key=lambda each: (after.count(each), max(i for i, other in enumerate(after) if other == each))
        )
        chance *= after.count(token) / len(after)
        if token == NOTHING or chance < least:
            break
        tokens.append(token)
        score += chance
    return tokens, score


def suffix_draft(texts, ids, k, proposer):
    """Reference implementation of SuffixProposer."""
    best, best_score = [], 0.0
    for text in texts:
        for length in range(min(proposer.max_suffix_length, len(ids)), 0, -1):
            most = min(k, proposer.max_suffix_length, int(proposer.max_spec_factor * length))
            tokens, score = continuation(text, ids[len(ids) - length :], most, proposer.min_probability)
            if score > best_score:
                best, best_score = tokens, score
    return tuple(best)


@given(TEXTS, st.integers(0, 6), st.integers(1, 5), st.sampled_from([0.4, 1.0, 2.5]), st.sampled_from([0, 0.1, 0.6]))
def test_suffix_proposer_equals_its_reference(ids, k, longest, factor, least):
    proposer = SuffixProposer(longest, factor, least, 0)
    for end in range(len(ids) + 1):
        found = draft_of(proposer, DraftContext(3, ids[:end]), k)
        assert found.tokens == suffix_draft([ids[:end]], ids[:end], k, proposer)
        assert found.distributions is None


@settings(max_examples=tiers.count(15, 60))
@given(st.lists(TEXTS, max_size=6), TEXTS, st.integers(2, 90), st.integers(1, 4))
def test_cached_outputs_equal_their_reference(outputs, ids, remembered, longest):
    proposer, young, old = SuffixProposer(longest, max_cached_tokens=remembered), [], []
    half = remembered // 2
    for key, output in enumerate(outputs):
        (proposer.learn if key % 2 else functools.partial(proposer.forget, key))(output)
        stored = output[max(0, len(output) - half + 1) :] if half > 1 else []
        if stored and len(young) + len(stored) >= half:
            young, old = [], young
        young += [*stored, NOTHING] if stored else []
        assert len(young) <= half
        assert len(old) <= half
    texts = [ids, *([young] if young else []), *([old] if old else [])]
    assert draft_of(proposer, DraftContext(99, ids), 5).tokens == suffix_draft(texts, ids, 5, proposer)


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


# both


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
@pytest.mark.fast_cases(2)
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

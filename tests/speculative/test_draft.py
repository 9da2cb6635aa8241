"""Drafts: chains and trees, and the distributions that their tokens are sampled from."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nucleate.speculative.draft import (
    ROOT,
    Draft,
    DraftContext,
    exclude_token,
    normalize,
    sample_inverse_cdf,
    sample_without_replacement,
    select_nodes,
    truncate,
)

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

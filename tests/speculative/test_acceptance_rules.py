"""Acceptance rules on small examples and edge cases."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from nucleate.speculative import acceptance
from nucleate.speculative.acceptance import (
    RULES,
    AcceptanceResult,
    block,
    rejection,
    typical,
)
from nucleate.speculative.draft import ROOT, Draft

EVERY = sorted(RULES)
EXACT = [name for name in EVERY if RULES[name].exact]
LAST = 1 - 2**-53
P = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.0, 1.0, 0.0]])
Q = np.array([0.2, 0.3, 0.5])


def test_rejection_by_hand():
    draft = Draft((2, 2), distributions=(Q, Q))
    assert rejection(P, draft, [0.39, 0.99], 0.5) == AcceptanceResult((0, 1), 1)  # 0.2 / 0.5, then 0.8 / 0.5
    assert rejection(P, draft, [0.41, 0.0], 0.5) == AcceptanceResult((), 0)  # max(p - q, 0) is nonzero only at 0
    assert rejection(P, Draft((2, 0), distributions=(Q, Q)), [0.0, 0.51], 0.0) == AcceptanceResult((0,), 2)  # 0.1 / 0.2
    assert rejection(P, Draft((0, 1)), [0.49, 0.0], 0.9) == AcceptanceResult((0, 1), 1)
    assert rejection(P, Draft((0, 1)), [0.51, 0.0], 0.59) == AcceptanceResult((), 1)  # 0.3 of 0.5
    assert rejection(P, Draft((0, 1)), [0.51, 0.0], 0.61) == AcceptanceResult((), 2)
    assert rejection(P, draft, [0.39, 0.99], 0.5).tokens(draft) == [2, 2, 1]


def test_block_by_hand():
    draft = Draft((2, 2), distributions=(Q, Q))
    # weights 0.4, 0.64; over q at 0.4: (0, 0, 0); after the first: (0.05, 0, 0)
    assert block(P, draft, [0.0, 0.63], 0.5) == AcceptanceResult((0, 1), 1)
    assert block(P, draft, [0.0, 0.65], 0.5) == AcceptanceResult((), 0)  # 0.4 p has nothing over q
    more = Draft((0, 2), distributions=(Q, Q))  # weights 1, 1
    assert block(P, more, [LAST, LAST], 0.5) == AcceptanceResult((0, 1), 1)
    down = Draft((0, 0), distributions=(Q, Q))  # weights 1, 0.5
    assert block(P, down, [LAST, 0.51], 0.5) == AcceptanceResult((0,), 2)
    half = Draft((2, 0), distributions=(Q, np.array([0.9, 0.1, 0.0])))  # weights 0.4, 0.0444; over: 0.32 / 0.92
    assert block(P, half, [0.347, 0.05], 0.5) == AcceptanceResult((0,), 2)
    assert block(P, half, [0.349, 0.05], 0.5) == AcceptanceResult((), 0)
    other = Draft((2, 1), distributions=(Q, np.array([0.02, 0.9, 0.08])))  # over: (0.02, 0, 0.24), and 0.26 / 0.86
    assert block(P, other, [0.30, 0.05], 0.07) == AcceptanceResult((0,), 0)
    assert block(P, other, [0.30, 0.05], 0.08) == AcceptanceResult((0,), 2)
    assert block(P, other, [0.31, 0.05], 0.08) == AcceptanceResult((), 0)
    assert block(P, Draft((2,)), [0.19], 0.5) == AcceptanceResult((0,), 2)
    assert block(P, Draft((2,)), [0.21], 0.5) == AcceptanceResult((), 0)


def test_siblings_by_hand():
    tree = Draft((2, 1, 1, 0), (ROOT, ROOT, 1, 1))
    rows = [P[0], P[1], P[1], P[2], P[2]]
    assert rejection(rows, tree, [0.19, 0, 0, 0], 0.5) == AcceptanceResult((0,), 2)
    assert rejection(rows, tree, [0.21, 0.37, 0.09, 0], 0.5) == AcceptanceResult((1, 2), 1)  # 0.3 of the remaining 0.8
    assert rejection(rows, tree, [0.21, 0.38, 0, 0], 0.99) == AcceptanceResult((), 0)
    assert rejection(rows, tree, [0.21, 0.37, 0.11, 0.12], 0.3) == AcceptanceResult((1,), 2)
    assert rejection(rows, tree, [0.21, 0.37, 0.11, 0.11], 0.3) == AcceptanceResult((1, 3), 1)  # 0.1 of 0.9
    twice = Draft((2, 2), (ROOT, ROOT))  # a repeated sibling does not become more likely
    assert rejection(rows, twice, [0.21, 0.0], 0.0) == AcceptanceResult((), 0)


def test_typical_by_hand():
    flat, sharp = np.full(10, 0.1), np.array([0.91, *[0.01] * 9])
    chain, both = Draft((3, 0)), AcceptanceResult((0, 1), 0)
    assert typical([flat, sharp, sharp], chain, [], 0.0) == both  # 0.09 exp(-2.3) is little
    assert typical([sharp, flat, flat], chain, [], 0.95) == AcceptanceResult((), 4)  # 0.01 is below 0.09 exp(-0.5)
    assert typical([sharp] * 3, chain, [], 0.0, posterior_threshold=0.009) == both
    assert typical([sharp] * 3, chain, [], 0.0, posterior_alpha=0.01) == both
    for p, result in ((0.25, AcceptanceResult((), 1)), (0.26, AcceptanceResult((0,), 0))):  # more than the threshold
        assert typical([[p, 1 - p], [1, 0]], Draft((0,)), [], 0.9, 0.25, 9.0) == result
    tree = Draft((3, 0, 0, 0, 1), (ROOT, ROOT, 0, 1, 1))
    assert typical([sharp] * 6, tree, [], 0.0) == AcceptanceResult((1, 3), 0)
    assert typical([flat] * 6, tree, [], 0.0) == AcceptanceResult((0, 2), 0)  # the first of the longest
    assert not RULES["typical"].exact
    assert "Not exact" in (inspect.getdoc(typical) or "")


@pytest.mark.parametrize("name", EXACT)
def test_equal_distributions_accept_everything(name):
    rng = np.random.default_rng(1)
    for size in (1, 2, 7, 31, 257, 1000):
        p = rng.random((4, size)) ** 8
        p /= p.sum(axis=1, keepdims=True)
        tokens = tuple(int(rng.choice(size, p=row)) for row in p[:3])
        for u in (0.0, LAST):
            verdict = RULES[name].verify(p, Draft(tokens, distributions=tuple(p[:3])), [LAST] * 3, u)
            assert verdict.path == (0, 1, 2)
            assert p[3, verdict.token] > 0


@pytest.mark.parametrize("name", EXACT)
def test_zero_residual(name):
    """A uniform number of 1 (possible by rounding) rejects a certain token; then p itself is sampled from."""
    for distribution in (P[0], None):
        p = P if distribution is not None else [[1.0, 0.0, 0.0], *P[1:]]
        verdict = RULES[name].verify(p, Draft((0,), distributions=(distribution,)), [1.0], 0.2)
        assert verdict == AcceptanceResult((), 0)
    verdict = RULES[name].verify(P, Draft((0, 2), distributions=(P[0], P[1])), [1.0, 1.0], 0.15)
    assert verdict == AcceptanceResult((), 0)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("u", [0.0, 0.5, LAST])
def test_impossible_tokens_are_never_returned(name, u):
    rng = np.random.default_rng(2)
    for _ in range(100):
        size = int(rng.integers(2, 9))
        p = rng.random((3, size)) * (rng.random((3, size)) < 0.5)
        p[np.arange(3), rng.integers(size, size=3)] = 1e-12
        distributions = tuple(rng.dirichlet(np.ones(size), 2)) if rng.random() < 0.7 else None
        draft = Draft(tuple(map(int, rng.integers(size, size=2))), distributions=distributions)
        verdict = RULES[name].verify(p, draft, [0.0, rng.random()] if u == 0 else rng.random(2), u)
        for row, token in enumerate(verdict.tokens(draft)):
            assert p[row, token] > 0


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -1.0, 0.0])
def test_invalid_target_rows_are_errors_if_reached(name, broken):
    verify_with, draft = RULES[name].verify, Draft((1, 1, 1))
    good, bad = [0.0, 1.0], [0.0, broken]
    for index in range(4):
        rows = [good] * index + [bad] + [good] * (3 - index)
        path, token, error = verify_with(rows, draft, [0.5] * 3, 0.5)
        assert (path, token) == (tuple(range(index)), -1)
        assert error == "the target has no valid distribution" + (f" after {index} draft tokens" if index else "")
        assert AcceptanceResult(path, token, error).tokens(draft) == [1] * index
        assert verify_with(rows, Draft((0, 1, 1)), [0.5] * 3, 0.5).error == (error if index == 0 else None)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(
    "distribution",
    [[np.nan, 1, 0], [0, 0, 0], [1, -1, 1], [np.inf, 0, 0], [1.0, 0.0, 0.0]],
    ids=["nan", "0", "-", "inf", "not it"],
)
def test_invalid_draft_distributions_end_the_draft(name, distribution):
    distributions = (P[0], np.array(distribution, float), P[2])
    for u in (0.05, 0.15, 0.5):
        verdict = RULES[name].verify(P[[0, 1, 2, 2]], Draft((0, 1, 1), distributions=distributions), [0.0] * 3, u)
        assert verdict == AcceptanceResult((0,), [0, 1, 2][int(np.searchsorted([0.1, 0.2], u))])
    siblings = Draft((1, 2), (ROOT, ROOT), (None, np.array(distribution, float)))
    assert rejection(P[[0, 1, 1]], siblings, [0.9, 0.0], 0.99) == AcceptanceResult((), 2)
    assert rejection(P[[0, 1, 1]], siblings, [0.9, 0.0], 0.0) == AcceptanceResult((), 0)
    first = Draft((1, 2), (ROOT, ROOT), (np.array(distribution, float), None))
    # later draft tokens are conditional on this one
    assert rejection(P[[0, 1, 1]], first, [0.0, 0.0], 0.4) == AcceptanceResult((), 0)


@pytest.mark.parametrize("name", EVERY)
def test_other_vocabulary_sizes_are_rejected(name):
    for token in (-1, 3):
        with pytest.raises(ValueError, match=rf"0\.\.2, got {token}"):
            RULES[name].verify(P, Draft((token,)), [0.5], 0.5)
    if name != "typical":
        with pytest.raises(ValueError, match="has 4 probabilities, but the vocabulary of the target 3"):
            RULES[name].verify(P, Draft((0,), distributions=(np.ones(4) / 4,)), [0.5], 0.5)
    with pytest.raises(ValueError, match="shape"):
        RULES[name].verify(P[None], Draft(), [], 0.5)


@pytest.mark.parametrize("name", EVERY)
def test_empty_draft_is_plain_sampling(name):
    for u, token in ((0.0, 0), (0.49, 0), (0.51, 1), (0.79, 1), (0.81, 2), (LAST, 2)):
        assert RULES[name].verify(P, Draft(), [], u) == AcceptanceResult((), token)


def test_block_verification_rejects_trees():
    with pytest.raises(ValueError, match="got a tree"):
        block(P, Draft((0, 1), (ROOT, ROOT)), [0, 0], 0)
    assert block(P, Draft((0, 2), (ROOT, 0)), [0, 0], 0) == AcceptanceResult((0, 1), 1)


@pytest.mark.parametrize("name", EXACT)
def test_distributions_of_any_size_and_dtype(name):
    """float32 distributions need not sum to exactly 1, and unnormalized weights are accepted."""
    rng = np.random.default_rng(3)
    x = rng.normal(0, 3, 50_001).astype(np.float32)
    p = np.exp(x - x.max())
    p32 = (p / p.sum()).astype(np.float32)
    tokens = tuple(map(int, np.argsort(-p)[:3]))
    rows, draft = [p32, p32 * 7, p, p], Draft(tokens, distributions=(p32 * 3, p, p32))
    verdict = RULES[name].verify(rows, draft, [1 - 1e-6] * 3, 0.5)
    assert verdict.path == (0, 1, 2)
    tiny = Draft((1,), distributions=([1.0, 1e-310],))
    assert RULES[name].verify([[0.5, 0.5]] * 2, tiny, [0.99], 0.7) == AcceptanceResult((0,), 1)


def test_target_rows_are_read_lazily():
    class RecordingRows:
        def __init__(self):
            self.seen = []

        def __getitem__(self, row):
            self.seen.append(row)
            return P[0]

    for rule, more in ((rejection, ()), (typical, (1.0, 9.0))):
        rows = RecordingRows()
        rule(rows, Draft((2, 2, 2)), [0.9] * 3, 0.5, *more)
        assert set(rows.seen) == {0}


def test_all_rules_are_tested():
    with pytest.raises(TypeError):
        RULES["mine"] = RULES["block"]
    assert {name: (rule.exact, rule.trees) for name, rule in RULES.items()} == {
        "rejection": (True, True),
        "block": (True, False),
        "typical": (False, True),
    }
    assert all(rule.verify is getattr(acceptance, name) for name, rule in RULES.items())


def test_block_verification_ends_at_impossible_tokens():
    rows = [[0.5, 0.5], [0.0, 1.0], [np.nan, 1.0]]
    assert block(rows, Draft((1, 0, 0)), [0.4, 0.0, 0.0], 0.5) == AcceptanceResult((0,), 1)
    assert block(rows, Draft((1, 0, 0)), [0.6, 0.0, 0.0], 0.5) == AcceptanceResult((), 0)
    assert block([[0.0, 1.0]], Draft((0, 0)), [0.0, 0.0], 0.5) == AcceptanceResult((), 1)

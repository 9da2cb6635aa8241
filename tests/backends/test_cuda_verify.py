"""Verification as plain tensor code: verdicts are those of ``engine.verify``, number by number, and by distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verdicts import assert_is, chain, drafts, laws, slow_rejection

from nucleate.core import noise
from nucleate.engine import verify as slow
from nucleate.engine.draft.draft import Draft

torch = pytest.importorskip("torch", reason="tensor code needs torch")
from nucleate.backends.cuda import verify  # noqa: E402
from nucleate.backends.cuda.verify import Verified  # noqa: E402

LAST = 1 - 2**-53


def integers(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(x, np.int64))


@given(st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_coupled_is_the_slow_rule(seed: int, count: int, size: int, stops: int) -> None:
    numbers, rows = np.random.default_rng(seed), 12
    drafted_RK = drafts(numbers, rows, count, size)
    drawn_RN = numbers.integers(size, size=(rows, count + 1))
    drawn_RN[numbers.random((rows, count + 1)) < 0.1] = -1
    stops_RS = numbers.integers(-1, 2 * size, size=(rows, stops))
    got = verify.coupled(*map(integers, (drafted_RK, drawn_RN, stops_RS)))
    chains = [chain(row) for row in drafted_RK]

    def draw(sequences: list[int], places: list[int]) -> list[int]:
        return [int(drawn_RN[row, place + 1]) for row, place in zip(sequences, places, strict=True)]

    expected = slow.coupled(
        [Draft(tuple(tokens)) for tokens in chains], draw, lambda row, token: token in stops_RS[row].tolist()
    )
    for row, verdict in enumerate(expected):
        ending = verdict.token in stops_RS[row].tolist() and verdict.token >= 0
        assert_is(got, row, verdict, chains[row], [verdict.token] if ending else [])
    if not stops:
        without = verify.coupled(integers(drafted_RK), integers(drawn_RN))
        assert all(torch.equal(*pair) for pair in zip(got, without, strict=True))


def test_coupled_by_hand() -> None:
    drafted = integers([[1, 2, 3], [1, 2, 3], [1, 2, 3], [-1, 2, 3], [1, -1, -1], [4, 2, 3], [1, 2, 3]])
    drawn = integers(
        [[1, 2, 3, 4], [1, 9, 3, 4], [1, 2, -1, 4], [-1, 2, 3, 4], [1, -1, -1, 4], [5, 2, 3, 4], [1, 2, 3, 9]]
    )
    got = verify.coupled(drafted, drawn, integers([[-1, 2], [-1, 2], [7, 3], [-1, -1], [-1, 4], [5, 5], [9, -1]]))
    assert got.kept_R.tolist() == [1, 1, 2, 0, 1, 0, 3]
    assert got.last_R.tolist() == [2, 9, -1, -1, -1, 5, 9]
    assert got.ended_R.tolist() == [True, False, False, False, False, True, True]
    assert got.failed_R.tolist() == [False, False, True, True, True, False, False]
    assert got.tokens_RN.tolist()[:3] == [[1, 2, -1, -1], [1, 9, -1, -1], [1, 2, -1, -1]]


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 4),
    st.sampled_from([1, 2, 3, 7, 31, 257]),
    st.booleans(),
    st.sampled_from([np.float32, np.float64]),
)
@settings(max_examples=120, deadline=None)
def test_rejection_is_the_slow_rule(seed: int, count: int, size: int, certain: bool, dtype: type) -> None:
    """At coins of the edges too: 0, what a float can come to below 1, and 1."""
    numbers, rows = np.random.default_rng(seed), 10
    p_RNV, drafted_RK = laws(numbers, (rows, count + 1, size), dtype), drafts(numbers, rows, count, size)
    q_RKV = None if certain else laws(numbers, (rows, count, size), dtype)
    if q_RKV is not None and numbers.random() < 0.3:
        some = numbers.random((rows, count)) < 0.7
        q_RKV[some] = p_RNV[:, :count][some]
    coins_RK, coin_R = numbers.random((rows, count)), numbers.random(rows)
    coins_RK[numbers.random((rows, count)) < 0.3] = numbers.choice([0.0, LAST, 1.0])
    coin_R[numbers.random(rows) < 0.3] = numbers.choice([0.0, LAST])
    stops_RS = numbers.integers(-1, 3 * size, size=(rows, 2))
    got = verify.rejection(
        torch.from_numpy(p_RNV), integers(drafted_RK), None if q_RKV is None else torch.from_numpy(q_RKV),
        torch.from_numpy(coins_RK), torch.from_numpy(coin_R), integers(stops_RS),
    )  # fmt: skip
    for row in range(rows):
        tokens, stops = chain(drafted_RK[row]), [stop for stop in stops_RS[row].tolist() if stop >= 0]
        laws_KV = None if q_RKV is None else q_RKV[row]
        verdict = slow_rejection(p_RNV[row], tokens, laws_KV, coins_RK[row], coin_R[row])
        assert_is(got, row, verdict, tokens, stops)


def one(p: Any, drafted: list[int], q: Any, coins: list[float], coin: float) -> Verified:
    """A row alone."""
    q_RKV = None if q is None else torch.tensor([q], dtype=torch.float64)
    p_RNV = torch.tensor(np.asarray([p]), dtype=torch.float64)
    coins_RK = torch.tensor([coins], dtype=torch.float64)
    return verify.rejection(p_RNV, integers([drafted]), q_RKV, coins_RK, torch.tensor([coin], dtype=torch.float64))


P = [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.0, 1.0, 0.0]]
Q = [0.2, 0.3, 0.5]


def test_rejection_by_hand() -> None:
    for drafted, q, coins, coin, tokens in (
        ([2, 2], [Q, Q], [0.39, 0.99], 0.5, [2, 2, 1]),
        ([2, 2], [Q, Q], [0.41, 0.0], 0.5, [0, -1, -1]),
        ([2, 0], [Q, Q], [0.0, 0.51], 0.0, [2, 2, -1]),
        ([0, 1], None, [0.49, 0.0], 0.9, [0, 1, 1]),
        ([0, 1], None, [0.51, 0.0], 0.59, [1, -1, -1]),
        ([0, 1], None, [0.51, 0.0], 0.61, [2, -1, -1]),
        ([0, 1], [P[0], P[1]], [1.0, 0.0], 0.2, [0, -1, -1]),  # nothing is over: p itself
        ([0, 1], [[0, 1, 1], Q], [0.0, 0.0], 0.9, [2, -1, -1]),  # that law could not have given it
        ([3, 1], [Q, Q], [0.0, 0.0], 0.9, [2, -1, -1]),  # no token
    ):
        got = one(P, drafted, q, coins, coin)
        assert got.tokens_RN.tolist() == [tokens]
        assert not got.failed_R.any()


def test_a_weight_of_nothing_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a device adds in an order in which sums go up and down."""
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 0.0]], dtype=torch.float64).expand(5, -1)
    u = torch.tensor([0.0, 1 / 3 - 1e-9, 1 / 3, LAST, 1.0], dtype=torch.float64)
    assert verify.choose(weights, u).tolist() == [1, 1, 3, 3, 3]
    summed = torch.Tensor.cumsum
    some = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, axis: summed(x, axis) + x.new_tensor([0, 0, 1e-15, 0, 0]))
    assert verify.choose(some, u[:1] + 0.5).tolist() == [3]


def test_coins_are_those_of_the_engine() -> None:
    words = np.random.default_rng(1).integers(2**64, size=(2, 9), dtype=np.uint64)
    words[:, 0] = 2**64 - 1
    seeds, steps = (torch.from_numpy(column.view(np.int64)) for column in words)
    got, last = verify.coins(seeds, steps, 4), verify.last_coin(seeds, steps)
    for row, (seed, step) in enumerate(words.T.tolist()):
        assert got[row].tolist() == slow.coins(seed, step, 4).tolist()
        assert last[row] == slow.last_coin(seed, step)
    assert verify.coins(seeds, steps, 0).shape == (9, 0)
    assert torch.allclose(verify.coins(seeds, steps, 4, torch.float32).double(), got, rtol=1e-6)


def test_float32_gives_the_same_tokens_but_for_float_edges() -> None:
    """For devices that have no float64."""
    numbers, rows = np.random.default_rng(2), 3000
    p, q = (torch.from_numpy(numbers.dirichlet(np.full(50, 0.3), (rows, n)).astype(np.float32)) for n in (4, 3))
    drafted = (
        q.cumsum(2).gt(torch.rand(rows, 3, 1, generator=torch.Generator().manual_seed(1))).to(torch.int8).argmax(2)
    )
    seeds, steps = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    exact, short = (
        verify.rejection(p, drafted, q, verify.coins(seeds, steps, 3, dtype), verify.last_coin(seeds, steps, dtype))
        for dtype in (torch.float64, torch.float32)
    )
    assert (exact.tokens_RN != short.tokens_RN).any(1).sum() <= 2
    assert len(set(exact.kept_R.tolist())) == 4


def test_what_does_not_fit_is_refused() -> None:
    drafted, coin = integers([[1, 2]]), torch.rand(1)
    with pytest.raises(ValueError, match="2 drafted tokens have 3 places"):
        verify.coupled(drafted, integers([[1, 2]]))
    with pytest.raises(ValueError, match=r"\[1, 3, vocabulary\], got \[1, 2, 5\]"):
        verify.rejection(torch.ones(1, 2, 5), drafted, None, torch.rand(1, 2), coin)
    with pytest.raises(ValueError, match=r"\[1, 2, 5\], got \[1, 2, 4\]"):
        verify.rejection(torch.ones(1, 3, 5), drafted, torch.ones(1, 2, 4), torch.rand(1, 2), coin)


V, TRIALS = 5, 30_000
TARGET_VV = np.random.default_rng(6).dirichlet(np.full(V, 0.9), V)
TARGET_VV[1, 3], TARGET_VV[4, 0] = 0.0, 0.0
TARGET_VV /= TARGET_VV.sum(1, keepdims=True)
DRAFTED_VV = np.random.default_rng(7).dirichlet(np.full(V, 0.8), V)
"""By the last token: what the target says, and what drafts are drawn from, which is nothing like it."""


def by_inverse(p_RV: np.ndarray, u_R: np.ndarray) -> np.ndarray:
    return (p_RV.cumsum(1) <= u_R[:, None]).sum(1).clip(max=V - 1)


def texts(count: int, law_VV: np.ndarray | None, stream: int = noise.DRAFT, accept: float = 1.0) -> np.ndarray:
    """The first three tokens of many sequences, by rounds of drafts of ``count`` tokens: counts [V, V, V].

    law_VV: what proposers say that they draw from; None: that a token could have been no other. Drafts are drawn with
    noise of a stream, and coins that decide on them are multiplied by ``accept``.
    """
    seeds, steps = torch.arange(TRIALS), torch.zeros(TRIALS, dtype=torch.int64)
    text_RT, before = np.full((TRIALS, 3 + count + 1), -1), np.zeros(TRIALS, np.int64)
    row_R = np.arange(TRIALS)
    for _ in range(3):
        drafted_RK, last_R = np.empty((TRIALS, count), np.int64), before
        u_RK = verify.uniform(seeds[:, None], steps[:, None], stream, torch.arange(count)).numpy()
        path = [last_R]
        for place in range(count):
            chances = DRAFTED_VV[path[-1]]
            drafted_RK[:, place] = by_inverse(chances, u_RK[:, place]) if law_VV is not None else chances.argmax(1)
            path.append(drafted_RK[:, place])
        q_RKV = None if law_VV is None else torch.from_numpy(law_VV[np.stack(path[:-1], 1)])
        got = verify.rejection(
            torch.from_numpy(TARGET_VV[np.stack(path, 1)]), integers(drafted_RK), q_RKV,
            verify.coins(seeds, steps, count) * accept, verify.last_coin(seeds, steps),
        )  # fmt: skip
        at_R = steps.numpy()
        for place in range(count + 1):
            here = (got.tokens_RN[:, place].numpy() >= 0) & (at_R < 3)
            text_RT[row_R[here], at_R[here] + place] = got.tokens_RN[:, place].numpy()[here]
        steps, before = steps + got.kept_R + 1, got.last_R.numpy()
    return np.bincount(np.ravel_multi_index(text_RT[:, :3].T, (V,) * 3), minlength=V**3)


def chi_square(seen: np.ndarray) -> float:
    """How far the texts are from the target, in standard deviations; what cannot be said is infinitely far."""
    p = (TARGET_VV[0][:, None, None] * TARGET_VV[:, :, None] * TARGET_VV[None]).ravel()
    if seen[p == 0].any():
        return np.inf
    few = p * TRIALS < 8
    expected, found = (np.append(x[~few], x[few].sum()) for x in (p * TRIALS, seen))
    expected, found = expected[expected > 0], found[expected > 0]
    freedom = len(expected) - 1
    return float(((found - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("count", [1, 3])
def test_texts_have_the_law_of_the_target(count: int) -> None:
    assert chi_square(texts(count, DRAFTED_VV)) < 5
    assert chi_square(texts(count, None)) < 5


def test_what_lies_about_its_drafts_does_not() -> None:
    """The laws of others, noise of the coins that decide, or of the one that chooses; and to keep everything."""
    assert chi_square(texts(2, np.full((V, V), 0.2))) > 30
    assert chi_square(texts(2, DRAFTED_VV, noise.ACCEPT)) > 30
    assert chi_square(texts(1, DRAFTED_VV, noise.RESIDUAL)) > 30
    assert chi_square(texts(2, DRAFTED_VV, accept=0.0)) > 30

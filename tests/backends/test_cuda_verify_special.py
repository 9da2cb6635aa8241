"""The kernels of verification, interpreted: verdicts are those of ``engine.verify``, with its noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import Interpreted
from verdicts import assert_is, chain, drafts, laws, slow_rejection

import nucleate as nc
from nucleate.dispatch.chain import chain_of
from nucleate.engine import verify as slow
from nucleate.engine.draft.law import choose
from nucleate.pipeline import simplify

torch = pytest.importorskip("torch", reason="the kernels are launched with torch's tensors")
pytest.importorskip("triton", reason="the kernels are Triton's: pip install triton (Linux only)")

from nucleate.backends.cuda import verify  # noqa: E402
from nucleate.backends.cuda.verify import Verified  # noqa: E402

SIZES = (1, 2, 31, 257, 2047, 2048, 2049, 5000)


@pytest.fixture(scope="module")
def kernels() -> Iterator[Interpreted]:
    process = Interpreted()
    yield process
    process.close()


def compare(
    kernels: Interpreted, p_RNV: Any, drafted_RK: Any, q_RKV: Any, words: Any, stops_RS: Any, **more: Any
) -> Any:
    """Every row is what the slow rule says of it."""
    seeds, steps = words.view(np.int64)
    given_ = {"stops": stops_RS, **more}
    *got, moved = kernels.call("rejection", p_RNV, drafted_RK, q_RKV, seeds, steps, given_)
    got = Verified(*map(torch.from_numpy, got))
    assert (moved == steps + (got.tokens_RN.numpy() >= 0).sum(1)).all()
    count = drafted_RK.shape[1]
    for row, (seed, step) in enumerate(words.T.tolist()):
        tokens, stops = chain(drafted_RK[row]), [stop for stop in stops_RS[row].tolist() if stop >= 0]
        coins, coin = slow.coins(seed, step, count), slow.last_coin(seed, step)
        verdict = slow_rejection(p_RNV[row], tokens, None if q_RKV is None else q_RKV[row], coins, coin)
        assert_is(got, row, verdict, tokens, stops)
    return got


def random_words(numbers: np.random.Generator, rows: int) -> np.ndarray:
    return numbers.integers(2**64, size=(2, rows), dtype=np.uint64)


def rounded(weights: np.ndarray, dtype: str) -> np.ndarray:
    """What is left of float32 in a shorter type."""
    return torch.from_numpy(weights).to(getattr(torch, dtype)).to(torch.float32).numpy()


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 5),
    st.sampled_from(SIZES),
    st.booleans(),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(1, 3),
)
@settings(max_examples=4, deadline=None)
def test_verdicts_are_those_of_the_slow_rule(
    kernels: Interpreted, seed: int, count: int, size: int, certain: bool, dtype: str, stride: int
) -> None:
    numbers, rows = np.random.default_rng(seed), 4
    p_RNV = rounded(laws(numbers, (rows, count + 1, size), np.float32), dtype)
    q_RKV = None if certain else rounded(laws(numbers, (rows, count, size), np.float32), dtype)
    if q_RKV is not None and numbers.random() < 0.3:
        q_RKV[:] = p_RNV[:, :count]
    drafted_RK, stops_RS = drafts(numbers, rows, count, size), numbers.integers(-1, 3 * size, size=(rows, 3))
    more = {"dtype": dtype, "stride": stride, "rows": rows + 2, "count": count + int(numbers.integers(2))}
    compare(kernels, p_RNV, drafted_RK, q_RKV, random_words(numbers, rows), stops_RS, **more)


def like_the_target(numbers: np.random.Generator, rows: int, count: int, size: int) -> tuple[Any, ...]:
    """Laws that drafts are drawn from, and targets that are not far from them."""
    q_RKV = numbers.dirichlet(np.full(size, 0.5), (rows, count)).reshape(rows, count, size).astype(np.float32)
    p_RNV = numbers.dirichlet(np.full(size, 0.5), (rows, count + 1)).astype(np.float32)
    p_RNV[:, :count] = 0.3 * p_RNV[:, :count] + 0.7 * q_RKV
    drafted_RK = (q_RKV.cumsum(2) < numbers.random((rows, count, 1))).sum(2).clip(max=size - 1)
    return p_RNV, drafted_RK, q_RKV


def test_drafts_like_the_target(kernels: Interpreted) -> None:
    """Of every length that stays, with ends by stop ids and without; weights that are not of one whole."""
    numbers, rows, size = np.random.default_rng(0), 24, 40
    p_RNV, drafted_RK, q_RKV = like_the_target(numbers, rows, 4, size)
    stops_RS = numbers.integers(-1, 3 * size, size=(rows, 5))
    got = compare(kernels, p_RNV / 2, drafted_RK, q_RKV * 3, random_words(numbers, rows), stops_RS)
    assert set(got.kept_R.tolist()) == {0, 1, 2, 3, 4}
    assert 0 < got.ended_R.sum() < rows
    assert not got.failed_R.any()


def test_what_is_no_law(kernels: Interpreted) -> None:
    """Of p and of q, at each place; and laws that could not have given a token."""
    numbers, odd, size, count = np.random.default_rng(2), (np.nan, np.inf, -0.25, 0.0), 30, 2
    rows = len(odd) * (2 * count + 1) + 6
    p_RNV, drafted_RK, q_RKV = like_the_target(numbers, rows, count, size)
    p_RNV[:, 0] = 0.2 * p_RNV[:, 0]
    p_RNV[np.arange(rows), 0, drafted_RK[:, 0]] += 0.8  # it mostly stays
    q_RKV[np.arange(rows - 6, rows), [0, 1] * 3, drafted_RK[np.arange(rows - 6, rows), [0, 1] * 3]] = 0.0
    for row in range(rows - 6):
        place, number = divmod(row, len(odd))
        laws_NV, at = (p_RNV[row], place) if place <= count else (q_RKV[row], place - count - 1)
        if odd[number] == 0.0:
            laws_NV[at] = 0.0
        laws_NV[at, numbers.integers(size)] = odd[number]
    got = compare(kernels, p_RNV, drafted_RK, q_RKV, random_words(numbers, rows), np.full((rows, 2), -1))
    assert 4 <= got.failed_R.sum() <= 12
    assert got.kept_R[rows - 6 :: 2].tolist() == [0] * 3


def test_a_draft_ends_before_what_is_no_token(kernels: Interpreted) -> None:
    numbers, none, size = np.random.default_rng(3), (-1, -7, 30, 2**40), 30
    p_RNV, drafted_RK, q_RKV = (np.repeat(column, 4, 0) for column in like_the_target(numbers, 2, 2, size))
    p_RNV[4:, 0] = q_RKV[4:, 0]  # so that the first one stays
    drafted_RK[:4, 0] = drafted_RK[4:, 1] = none
    seeds, steps = np.full(8, 5), np.full(8, 3)
    kept, tokens, *_ = kernels.call("rejection", p_RNV, drafted_RK, q_RKV, seeds, steps)
    assert kept.tolist() == [0] * 4 + [1] * 4
    assert len(set(map(tuple, tokens[:4].tolist()))) == len(set(map(tuple, tokens[4:].tolist()))) == 1


def test_only_the_row_at_which_a_draft_ends_is_read(kernels: Interpreted) -> None:
    """Where it is known what laws weigh: elsewhere only the chances of drafted tokens are there."""
    numbers, rows, count, size = np.random.default_rng(1), 4, 3, 2100
    p_RNV, drafted_RK, q_RKV = like_the_target(numbers, rows, count, size)
    words, stops_RS = random_words(numbers, rows), np.full((rows, 1), -1)
    for given_ in (q_RKV, None):
        known = p_RNV if given_ is None else np.concatenate((p_RNV, given_), 1)
        sums = known.sum(2, dtype=np.float64)
        expected = compare(kernels, p_RNV, drafted_RK, given_, words, stops_RS, sums=sums)
        bare = []
        for laws_ in (p_RNV, given_):
            if laws_ is None:
                bare.append(None)
                continue
            left = np.full_like(laws_, np.nan)
            for row, place in enumerate(expected.kept_R.tolist()):
                at = np.arange(min(count, laws_.shape[1]))
                left[row, at, drafted_RK[row, at]] = laws_[row, at, drafted_RK[row, at]]
                if place < laws_.shape[1]:
                    left[row, place] = laws_[row, place]
            bare.append(left)
        columns = drafted_RK, bare[1], *words.view(np.int64), {"sums": sums, "stops": stops_RS}
        got = kernels.call("rejection", bare[0], *columns)
        for column, same in zip(got, expected, strict=False):
            assert column.tolist() == same.tolist()
        sums[3, 0] = np.nan  # it is none
        failed = kernels.call("rejection", bare[0], *columns)[4]
        assert failed.tolist() == [row == 3 for row in range(rows)]


def test_nothing_over_is_not_the_end(kernels: Interpreted) -> None:
    """As after sums that are too large, which make tokens stay less often: then p itself is drawn from."""
    numbers, rows, size = np.random.default_rng(4), 6, 30
    p_RNV, drafted_RK, _ = like_the_target(numbers, rows, 1, size)
    words, q_RKV = random_words(numbers, rows), p_RNV[:, :1].copy()
    sums = np.concatenate((p_RNV, q_RKV), 1).sum(2, dtype=np.float64) * [1e9, 1.0, 1.0]
    seeds, steps = words.view(np.int64)
    kept, tokens, *_ = kernels.call("rejection", p_RNV, drafted_RK, q_RKV, seeds, steps, {"sums": sums})
    assert kept.tolist() == [0] * rows
    for row, (seed, step) in enumerate(words.T.tolist()):
        assert tokens[row, 0] == choose(p_RNV[row, 0].astype(float), slow.last_coin(seed, step))


def test_coins_at_the_border(kernels: Interpreted) -> None:
    """A chance is the float32 next to a coin, above it or below: a token stays, or not; or it is the last, or not."""
    words = np.stack((np.arange(40, dtype=np.uint64), np.full(40, 7, np.uint64)))
    coins = np.array([slow.coins(seed, 7, 1)[0] for seed in range(40)])
    last = np.array([slow.last_coin(seed, 7) for seed in range(40)])
    for coin_R, count, first in ((coins, 1, 0), (last, 0, 2047)):
        some = np.flatnonzero(coin_R > 0.5)[:6]  # 1 - x is exact
        near = coin_R[some].astype(np.float32)
        for x, stays in (
            (np.where(near > coin_R[some], near, np.nextafter(near, np.float32(2))), True),
            (np.where(near < coin_R[some], near, np.nextafter(near, np.float32(0))), False),
        ):
            p_RNV = np.zeros((len(some), count + 1, 2100), np.float32)
            p_RNV[:, 0, first], p_RNV[:, 0, first + 1], p_RNV[:, count] = x, 1 - x, p_RNV[:, count]
            p_RNV[:, count, 5] += count
            drafted_RK, stops_RS = np.full((len(some), count), first), np.full((len(some), 1), -1)
            got = compare(kernels, p_RNV, drafted_RK, None, words[:, some], stops_RS)
            assert set(got.tokens_RN[:, 0].tolist()) == {first if stays else first + 1}


@given(st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_coupled_is_that_of_tensors(kernels: Interpreted, seed: int, count: int, size: int, stops: int) -> None:
    numbers, rows = np.random.default_rng(seed), 6
    drafted_RK, drawn_RN = drafts(numbers, rows, count, size), numbers.integers(size, size=(rows, count + 1))
    drawn_RN[numbers.random((rows, count + 1)) < 0.1] = -1
    stops_RS = numbers.integers(-1, 2 * size, size=(rows, stops)) if stops else None
    steps = numbers.integers(-(2**62), 2**62, size=rows)
    more = {"stops": stops_RS, "rows": rows + 1, "count": count + int(numbers.integers(2))}
    *got, moved, places = kernels.call("coupled", drafted_RK, drawn_RN, steps, more)
    columns = (None if x is None else torch.from_numpy(x) for x in (drafted_RK, drawn_RN, stops_RS))
    for column, same in zip(got, verify.coupled(*columns), strict=True):
        assert column.tolist() == same.tolist()
    assert moved.tolist() == (steps + (got[1] >= 0).sum(1)).tolist()
    assert places.tolist() == (moved[:, None] + np.arange(count + 1)).tolist()


def test_rounds_say_what_is_said_without_drafts(kernels: Interpreted) -> None:
    """Draws at all places and their verification, again and again, without a word from the host."""
    numbers, size, rows = np.random.default_rng(5), 12, 2
    table_VV = (numbers.normal(size=(size, size)) * 1.2).astype(np.float32)
    params = [{"temperature": 0.8}, {"top_k": 3}]
    chains = [list(chain_of(simplify(nc.SamplingParams(**one).pipeline())).numbers) for one in params]
    seeds, first = numbers.integers(2**62, size=rows), np.arange(rows)
    said = kernels.call("rounds", table_VV, table_VV.argmax(1), first, chains, seeds, 2, 3)
    assert len({int(count) for tokens in said for count in (tokens >= 0).sum(1)}) > 1
    for row in range(rows):
        got = [int(token) for tokens in said for token in tokens[row] if token >= 0]
        expected = [int(first[row])]
        for step in range(len(got)):
            asked = nc.SamplingParams(**params[row], seed=int(seeds[row]))
            expected += nc.sample(table_VV[expected[-1]][None], asked, step=step, backend="reference").tolist()
        assert got == expected[1:]


def test_what_does_not_fit_is_refused(kernels: Interpreted) -> None:
    p_RNV, drafted_RK, word = np.ones((2, 3, 9), np.float32), np.zeros((2, 2), np.int64), np.zeros(2, np.int64)

    def ask(*given_: Any, **more: Any) -> Any:
        return kernels.call("rejection", *given_, {"stops": None, **more})

    assert not ask(p_RNV, drafted_RK, None, word, word)[4].any()
    with pytest.raises(ValueError, match="room for up to 1 rows with 2"):
        ask(p_RNV, drafted_RK, None, word, word, rows=1)
    with pytest.raises(ValueError, match="rows with 1"):
        ask(p_RNV, drafted_RK, None, word, word, count=1)
    with pytest.raises(ValueError, match="room for 8"):
        ask(p_RNV, drafted_RK, None, word, word, size=8)
    with pytest.raises(ValueError, match="float64"):
        ask(p_RNV, drafted_RK, None, word, word, dtype="float64")
    with pytest.raises(ValueError, match="seeds must be"):
        ask(p_RNV, drafted_RK, None, word[:1], word)
    with pytest.raises(ValueError, match="drafted tokens must be"):
        ask(p_RNV, drafted_RK.astype(np.int32), None, word, word)
    with pytest.raises(ValueError, match="stop ids must be"):
        ask(p_RNV, drafted_RK, None, word, word, stops=np.zeros((1, 2), np.int64))
    with pytest.raises(ValueError, match=r"sums must be torch.float64 \[2, 3\]"):
        ask(p_RNV, drafted_RK, None, word, word, sums=np.zeros((2, 5)))
    with pytest.raises(ValueError, match="vocabulary"):
        ask(p_RNV[:, 1:], drafted_RK, None, word, word)
    drawn_RN = np.zeros((2, 3), np.int64)
    assert kernels.call("coupled", drafted_RK, drawn_RN, word)[0].tolist() == [2, 2]
    with pytest.raises(ValueError, match="drawn tokens must be"):
        kernels.call("coupled", drafted_RK, drawn_RN[:, 1:], word)
    with pytest.raises(ValueError, match="steps must be"):
        kernels.call("coupled", drafted_RK, drawn_RN, word[:1])
    with pytest.raises(ValueError, match="room for up to 1 rows"):
        kernels.call("coupled", drafted_RK, drawn_RN, word, {"rows": 1})

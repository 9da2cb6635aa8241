"""Logprobs and ranks of a few tokens equal a naive sort of all tokens, without sorting."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nucleate.sampling import reference
from nucleate.sampling.stages import Gumbel, Logprobs, Suppress, Temperature, TopK
from nucleate.sampling.token_logprobs import logprobs, row_logprobs

INF = math.inf


def naive(ids, x, chosen, top=0, requested=()):
    """The same result from a full sort in plain Python."""
    rows = sorted((-score, token) for token, score in zip(ids, x, strict=True) if score > -INF)
    best = -rows[0][0]
    log_mass = best + math.log(math.fsum(math.exp(-score - best) for score, _ in rows))
    ranked = {token: (token, -score - log_mass, rank) for rank, (score, token) in enumerate(rows, 1)}
    return ranked[chosen], [*ranked.values()][:top], [ranked.get(token, (token, -INF, None)) for token in requested]


def assert_equal(got, expected):
    for one, other in zip(
        (got.chosen, *got.top, *got.requested), (expected[0], *expected[1], *expected[2]), strict=True
    ):
        assert (one.token_id, one.rank) == (other[0], other[2])
        assert one.logprob == pytest.approx(other[1], rel=1e-12, abs=1e-12)
        assert type(one.token_id) is int
        assert type(one.logprob) is float
        assert one.rank is None or type(one.rank) is int


SCORE = st.sampled_from([-INF, -3.5, -1.0, 0.0, 1.0, 1.0, 2.25, 700.0, -700.0]) | st.floats(-50, 50, width=32)


@given(
    st.dictionaries(st.integers(0, 60), SCORE, min_size=1, max_size=40),
    st.sampled_from([0, 1, 2, 5, 39, 40, 41, 10**6]),
    st.lists(st.integers(0, 70), max_size=6).map(tuple),
    st.randoms(use_true_random=False),
)
def test_any_tokens_in_any_order_equal_a_full_sort(scores, top, requested, numbers):
    scores[7] = 0.5  # at least one token survives
    items = list(scores.items())
    numbers.shuffle(items)
    ids, x = (list(column) for column in zip(*items, strict=True))
    chosen = numbers.choice([token for token, score in items if score > -INF])
    for kind in (np.float64, np.float32):
        given_x = np.array(x, kind)
        got = logprobs(np.array(ids), given_x, chosen, top, requested)
        assert_equal(got, naive(ids, given_x.astype(float).tolist(), chosen, top, requested))


@pytest.mark.parametrize("top", [0, 1, 2, 3, 4, 5, 9])
def test_ties_go_to_the_lowest_id_in_any_input_order(top):
    ids = np.array([9, 4, 30, 2, 17])
    got = logprobs(ids, np.array([1.0, 1, 1, 1, 5]), 9, top)
    assert [one.token_id for one in got.top] == [17, 2, 4, 9, 30][:top]
    assert [one.rank for one in got.top] == [1, 2, 3, 4, 5][:top]
    assert got.chosen.rank == 4
    equal = logprobs(ids, np.zeros(5), 30, top, (2, 9, 30))
    assert [one.token_id for one in equal.top] == [2, 4, 9, 17, 30][:top]
    assert [one.rank for one in equal.requested] == [1, 3, 5]
    assert [one.logprob for one in equal.top] == pytest.approx([-math.log(5)] * min(top, 5))


def test_masked_tokens_have_no_rank_and_are_not_listed():
    ids = np.array([0, 1, 2, 3])
    got = logprobs(ids, np.array([-INF, 2.0, -INF, 2.0]), 3, 4, (0, 1, 2, 3, 4, 99))
    assert [one.token_id for one in got.top] == [1, 3]
    assert [(one.logprob, one.rank) for one in got.requested] == [
        *[(-INF, None), (pytest.approx(-math.log(2)), 1), (-INF, None)],
        *[(pytest.approx(-math.log(2)), 2), (-INF, None), (-INF, None)],
    ]


def test_a_single_token_has_logprob_0():
    got = logprobs(np.array([5]), np.array([-1e30]), 5, 3, (5, 5, 0))
    assert got.chosen == got.top[0] == got.requested[0] == got.requested[1] == (5, 0.0, 1)
    assert got.requested[2] == (0, -INF, None)


@pytest.mark.parametrize("far", [3e38, -3e38, 1e5])
def test_large_scores_do_not_overflow(far):
    x = np.array([far, far, -3.4e38], np.float32)
    got = logprobs(np.arange(3), x, 1, 3)
    assert got.chosen.logprob == pytest.approx(-math.log(2)) if far != -3e38 else got.chosen.rank == 2
    assert all(math.isfinite(one.logprob) for one in got.top)


def test_the_inputs_are_not_modified():
    ids, x = np.array([3, 1, 2]), np.array([0.0, 5.0, 1.0])
    ids.flags.writeable = x.flags.writeable = False
    assert logprobs(ids, x, 1, 2).top[0].token_id == 1


def test_a_report_depends_on_its_position_in_the_pipeline():
    logits = np.array([0.5, 2.0, 1.0, 2.0, -1.0, -INF], np.float32)
    for cut in ((), (Temperature(0.5),), (TopK(2),), (Suppress((1,)), Temperature(2.0), TopK(3))):
        survivors = reference.survivors(logits, cut)
        for after in ((), (TopK(1),)):
            result = reference.run(logits, (*cut, Logprobs(9, (5, 1, 0)), *after, Gumbel(4)), 4, 0)
            expected = naive(survivors.ids_N.tolist(), survivors.x_N.tolist(), result.token, 9, (5, 1, 0))
            assert_equal(result.logprobs, expected)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("ties", [False, True])
def test_a_large_vocabulary_is_not_sorted(kind, ties):
    x = np.random.default_rng(0).normal(size=256_000).astype(kind)
    x = np.round(x * 4) / 4 if ties else x
    ids = np.arange(len(x))

    def seconds(work):
        best = INF
        for _ in range(7):
            start = time.thread_time()
            work()
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(lambda: logprobs(ids, x, 77, 20, (5,))) < 0.5 * seconds(lambda: np.argsort(-x, kind="stable"))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_without_a_distribution_have_no_logprobs(bad):
    rows = np.zeros((4, 3), np.float32)
    rows[1, 2], rows[3] = bad, -INF
    found = row_logprobs(rows, [0, 1, 2, 0], 2, (1,))
    assert [one is None for one in found] == [False, True, False, True]

"""The Triton kernels, interpreted: survivors and tokens equal the reference's, with the documented number of passes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import edge_rows as edges
import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import Interpreted

from nucleate.sampling import noise, reference
from nucleate.sampling.inputs import masked_tokens
from nucleate.sampling.pipeline import FusedParams, simplify, to_fused_pipeline
from nucleate.sampling.stages import Gumbel

pytest.importorskip("torch", reason="the kernels are launched with torch's tensors")
pytest.importorskip("triton", reason="the kernels are Triton's: pip install triton (Linux only)")

import near_tie_rows as near_ties

SIZES = (1, 2, 31, 255, 256, 257, 700, 1000)
CLOSE = 1e-13
"""Relative distances to a tie below this are beyond float64."""


@pytest.fixture(scope="module")
def kernels() -> Iterator[Interpreted]:
    process = Interpreted()
    yield process
    process.close()


@pytest.fixture(autouse=True)
def _edges_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "NEAR", CLOSE)


def compare(
    x_RV: np.ndarray, params: list[FusedParams], tight: list[bool], seeds: Any, steps: Any, got: dict[str, Any]
) -> Counter[str]:
    """Compare rows with the reference; differences at float edges are counted, others fail."""
    cuts_R1, lasts_R1 = got["cuts"][:, None], got["lasts"][:, None]
    inside_RV = (x_RV > cuts_R1) | ((x_RV == cuts_R1) & (np.arange(x_RV.shape[1]) <= lasts_R1))
    assert got["states"].tolist() == [0] * len(x_RV)
    assert (got["steps"] == steps + 1).all()
    return edges.compared(x_RV, params, tight, seeds, steps, inside_RV, got["tokens"])


def survey(kernels: Interpreted, rows: int, sizes: tuple[int, ...], seed: int) -> Counter[str]:
    rng, found = np.random.default_rng(seed), Counter[str]()
    for size in sizes:
        x_RV, params, tight = edges.fused_rows(rng, rows, size)
        seeds, steps = edges.words(rng, rows), edges.words(rng, rows)
        got = kernels.call("sample", x_RV, [list(one) for one in params], seeds, steps)
        found += compare(x_RV, params, tight, seeds, steps, got)
    print(found)
    return found


@pytest.mark.slow
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 5))
@settings(max_examples=8)
def test_noise_has_the_bits_of_the_reference(kernels: Interpreted, seed: int, step: int, stream: int) -> None:
    u, waits = kernels.call("uniforms", seed, step, stream, 256)
    expected = noise.uniform(seed, step, stream, np.arange(256))
    assert u == expected.tolist()
    assert np.allclose(waits, -np.log1p(-expected), rtol=1e-15, atol=0)


@pytest.mark.slow
def test_survivors_and_tokens_equal_the_reference(kernels: Interpreted) -> None:
    assert survey(kernels, tiers.count(3, 9), SIZES, 0) == Counter(rows=tiers.count(3, 9) * len(SIZES))


@pytest.mark.exhaustive
def test_many_survivors_and_tokens_equal_the_reference(kernels: Interpreted) -> None:
    found = survey(kernels, 100, SIZES, 1)
    assert edges.edges_of(found, tight=False) == 0
    assert edges.edges_of(found, tight=True) <= 2


@pytest.mark.slow
def test_survivor_sets_larger_than_the_tile_equal_the_reference(kernels: Interpreted) -> None:
    """Flat rows, heavy ties, large k."""
    rng, size = np.random.default_rng(1), 5000
    flat, ties = rng.normal(size=size) * 0.1, np.round(rng.normal(size=size)) / 4
    x_RV = np.stack([flat, flat, flat, ties, ties, np.zeros(size), np.zeros(size), flat]).astype(np.float32)
    p, k = FusedParams(p=0.9), FusedParams(k=3000)
    params = [p, k, FusedParams(k=3000, p=0.8, late_m=0.7, late_t=2.0), p, k, p, k, FusedParams(sigmas=2.0, p=0.999)]
    seeds, steps = edges.words(rng, 8), edges.words(rng, 8)
    got = kernels.call("sample", x_RV, [list(one) for one in params], seeds, steps)
    found = compare(x_RV, params, [False] * 8, seeds, steps, got)
    assert found == Counter(rows=8)


@pytest.mark.slow
def test_rows_are_divided_until_a_bin_fits(kernels: Interpreted) -> None:
    """Bins with more unequal tokens than fit; ties that one or both truncations divide; outliers."""
    rng, size = np.random.default_rng(9), 4000
    tiny, two = rng.normal(size=size) * 1e-20, np.where(np.arange(size) % 2, 1e-30, 2e-30)
    outlier = np.where(np.arange(size) == 7, 9.0, rng.normal(size=size) * 1e-7)
    x_RV = np.stack([tiny, tiny, two, two, two, outlier, outlier]).astype(np.float32)
    params = [
        FusedParams(p=0.9),
        FusedParams(k=2500, p=0.9),
        FusedParams(p=0.3),
        FusedParams(k=3000),
        FusedParams(k=2500, p=0.9),
    ]
    params += [FusedParams(k=2500), FusedParams(t=0.7, p=0.99999, m=1e-7)]
    seeds, steps = edges.words(rng, 7), edges.words(rng, 7)
    got = kernels.call("sample", x_RV, [list(one) for one in params], seeds, steps)
    assert compare(x_RV, params, [False] * 7, seeds, steps, got) == Counter(rows=7)


READ = {  # (row, parameters): the maximum number of passes over the row
    "peaked, top-k": ("peaked", FusedParams(t=0.8, k=20), 1.4),
    "peaked, top-k, top-p": ("peaked", FusedParams(t=0.8, k=10, p=0.9), 1.3),
    "peaked, top-p": ("peaked", FusedParams(p=0.9), 1.2),
    "no cut": ("flat", FusedParams(t=0.8), 1.1),
    "min-p": ("flat", FusedParams(m=0.1), 1.3),
    "flat, top-p": ("flat", FusedParams(p=0.9), 4.0),
    "next to uniform, top-p": ("uniform", FusedParams(p=0.9), 4.0),
    "few scores, top-p": ("ties", FusedParams(p=0.9), 4.0),
    "one score, top-p": ("equal", FusedParams(p=0.9), 4.0),
    "large k": ("flat", FusedParams(k=3000), 4.0),
    "large k of few scores": ("ties", FusedParams(k=3000), 4.0),
    "large k, top-p": ("flat", FusedParams(k=3000, p=0.8), 4.0),
    "large k, an outlier": ("outlier", FusedParams(k=3000), 4.0),
}


@pytest.mark.parametrize("description", READ)
@pytest.mark.fast_cases(0)
def test_the_number_of_passes_over_a_row(kernels: Interpreted, description: str) -> None:
    kind, params, most = READ[description]
    rng = np.random.default_rng(10)
    x = rng.normal(size=30_000 if kind == "peaked" else 10_000)
    x = {
        "flat": x,
        "peaked": np.where(rng.random(len(x)) < 1e-3, x * 2.5 + 20.0 * rng.random(len(x)), x * 2.5),
        "uniform": x * 1e-4,
        "ties": np.round(x * 4) / 4,
        "equal": x * 0.0,
        "outlier": np.where(np.arange(len(x)) == 5, 1e4, x),
    }[kind].astype(np.float32)
    cuts = params.k > 0 or params.p < 1.0
    more = {"report": False, "cuts": cuts}
    got = kernels.call("sample", x[None], [list(params)], np.array([3]), np.array([4]), more)
    launches = ["stats", "finish", "tally", "collect", "resume"]
    assert [name for name, _ in got["reads"]] == launches[: 5 if cuts else 2]
    assert sum(reads for _, reads in got["reads"]) <= most, got["reads"]
    assert compare(x[None], [params], [False], np.array([3]), np.array([4]), got) == Counter(rows=1)


def near_tie_tokens(kernels: Interpreted, cases: list[near_ties.Case]) -> list[int]:
    """The tokens of near ties as one batch; rows are padded to the longest."""
    size = max(len(case.logits) for case in cases)
    x_RV = np.stack([np.pad(case.logits, (0, size - len(case.logits)), constant_values=-np.inf) for case in cases])
    params = [list(to_fused_pipeline(simplify(case.stages)).params) for case in cases]
    seeds = np.array([case.seed for case in cases], np.uint64).view(np.int64)
    return kernels.call("sample", x_RV, params, seeds, np.array([case.step for case in cases]))["tokens"].tolist()


def supported_near_ties(start: int, count: int, longest: int) -> list[near_ties.Case]:
    """The next near ties that the fused kernel supports."""
    cases = (near_ties.case(index) for index in itertools.count(start) if index % len(near_ties.KINDS) not in TYPICAL)
    fits = (
        one
        for one in cases
        if len(one.logits) <= longest and not isinstance(to_fused_pipeline(simplify(one.stages)), str)
    )
    return list(itertools.islice(fits, count))


TYPICAL = {position for position, kind in enumerate(near_ties.KINDS) if kind.startswith("typical")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", [1, 2, pytest.param(16, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.exhaustive)]
)
def test_near_ties_are_decided_like_the_reference(kernels: Interpreted, rows: int) -> None:
    cases = supported_near_ties(1000 * rows, rows, 3000)
    expected = [reference.draw(case.logits, case.stages, case.seed, case.step) for case in cases]
    assert near_tie_tokens(kernels, cases) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(10))
def test_all_near_ties_are_decided_like_the_reference(kernels: Interpreted, part: int) -> None:
    cases = supported_near_ties(1000 * part, 500, 40_000)
    cases.sort(key=lambda case: len(case.logits))
    for some in (cases[position : position + 20] for position in range(0, len(cases), 20)):
        expected = [reference.draw(case.logits, case.stages, case.seed, case.step) for case in some]
        assert near_tie_tokens(kernels, some) == expected


@pytest.mark.slow
def test_a_few_tokens_among_many_groups(kernels: Interpreted) -> None:
    """Group maxima bound the threshold; each token in its own group or not, with ties at the threshold or not."""
    rng, size = np.random.default_rng(6), 3000
    spread, grid = rng.normal(size=size), np.round(rng.normal(size=size) * 2) / 2
    near = np.where(np.arange(size) < 20, 5.0 + rng.random(size), spread)
    x_RV = np.repeat(np.stack([spread, grid, near]), 6, 0).astype(np.float32)
    params = [FusedParams(k=k, p=p) for k, p in ((2, 1.0), (3, 1.0), (5, 0.9), (12, 1.0), (13, 0.5), (40, 0.99))] * 3
    seeds, steps = edges.words(rng, 18), edges.words(rng, 18)
    got = kernels.call("sample", x_RV, [list(one) for one in params], seeds, steps)
    assert compare(x_RV, params, [False] * 18, seeds, steps, got) == Counter(rows=18)


@pytest.mark.slow
def test_thresholds_that_meet_at_one_score(kernels: Interpreted) -> None:
    """Rows of equal tokens: thresholds within each other's survivors, at the first token, and after the last."""
    x_RV = np.zeros((5, 700), np.float32)
    x_RV[:, 1::2] = -0.0
    x_RV[4] = np.linspace(2.0, -2.0, 700)
    params = [
        FusedParams(p=1e-6),
        FusedParams(k=300, p=1 - 1e-9),
        FusedParams(k=300, p=0.5),
        FusedParams(k=2),
        FusedParams(late_m=0.3),
    ]
    seeds, steps = edges.words(np.random.default_rng(7), 5), edges.words(np.random.default_rng(8), 5)
    got = kernels.call("sample", x_RV, [list(one) for one in params], seeds, steps)
    assert compare(x_RV, params, [False] * 5, seeds, steps, got) == Counter(rows=5)
    assert got["lasts"][:4].tolist() == [0, 299, 149, 1]


@pytest.mark.slow
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(SIZES),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(1, 3),
)
@settings(max_examples=6)
def test_any_rows_of_any_type_and_strides(kernels: Interpreted, seed: int, size: int, dtype: str, stride: int) -> None:
    rng = np.random.default_rng(seed)
    x_RV, params, _ = edges.fused_rows(rng, 3, size)
    # -inf becomes a score, which has the same effect
    x_RV = np.clip(x_RV, -6e4, 6e4).astype(np.float16).astype(np.float32)
    x_RV = (x_RV.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if dtype == "bfloat16" else x_RV
    seeds, steps = edges.words(rng, 3), edges.words(rng, 3)
    more = {"dtype": dtype, "stride": stride, "rows": 5}
    got = kernels.call("sample", x_RV, [list(one) for one in params], seeds, steps, more)
    compare(x_RV, params, [True] * 3, seeds, steps, got)


@pytest.mark.slow
def test_invalid_rows_give_no_token_and_a_reason(kernels: Interpreted) -> None:
    rng = np.random.default_rng(2)
    x_RV = rng.normal(size=(7, 600)).astype(np.float32)
    seeds, steps = edges.words(rng, 7), edges.words(rng, 7)
    params = [list(FusedParams(p=0.9)), list(FusedParams(t=0.0)), list(FusedParams(k=9)), list(FusedParams())] * 2
    expected = kernels.call("sample", x_RV, params[:7], seeds, steps)["tokens"].tolist()
    x_RV[1, 5], x_RV[2, 599], x_RV[3], x_RV[5, 0], x_RV[5, 300] = np.nan, np.inf, -np.inf, np.nan, np.inf
    got = kernels.call("sample", x_RV, params[:7], seeds, steps)
    assert got["states"].tolist() == [0, 1, 1, 2, 0, 1, 0]
    assert got["tokens"].tolist() == [
        token if state == 0 else -1 for token, state in zip(expected, got["states"], strict=True)
    ]
    assert (got["steps"] - steps).tolist() == [1, 0, 0, 0, 1, 0, 1]


def test_masked_logits_may_be_invalid_but_make_the_row_invalid_too(kernels: Interpreted) -> None:
    x_RV, mask = np.zeros((3, 40), np.float32), np.full((3, 3), -1, np.int32)
    x_RV[0, 33], x_RV[1, 33] = np.nan, np.inf
    mask[:, 1] = ~2
    mask[2] = 0
    zeros = np.zeros(3, np.int64)
    got = kernels.call("sample", x_RV, [list(FusedParams())] * 3, zeros, zeros, {"mask": mask})
    assert got["states"].tolist() == [1, 1, 2]


@pytest.mark.slow
def test_masks_equal_the_reference(kernels: Interpreted) -> None:
    rng, rows = np.random.default_rng(3), 5
    for size in (40, 257, 700):
        x_RV = np.stack([edges.row(rng, size, kind) for kind in ("smooth", "grid", "holes", "peaked", "shifted")])
        masks_RW = rng.integers(-(2**31), 2**31, (rows, -(-size // 32))).astype(np.int32)
        allowed = [np.where(masked_tokens(m, size), -np.inf, x) for x, m in zip(x_RV, masks_RW, strict=True)]
        params = [
            FusedParams(t=0.7, p=0.9),
            FusedParams(k=5),
            FusedParams(t=0.0),
            FusedParams(m=0.02, sigmas=2.0),
            FusedParams(t=1.5),
        ]
        seeds, steps = edges.words(rng, rows), edges.words(rng, rows)
        got = kernels.call("sample", x_RV, [list(one) for one in params], seeds, steps, {"mask": masks_RW})
        expected = np.stack(allowed).astype(np.float32)
        assert compare(expected, params, [False] * rows, seeds, steps, got) == Counter(rows=rows)
        log_p = x_RV.astype(np.float64) - x_RV.max(1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
        for row, token in enumerate(got["tokens"].tolist()):  # of the unmodified logits
            assert got["logprobs"][row] == pytest.approx(log_p[row, token], abs=1e-6)
            assert got["ranks"][row] == 1 + reference.all_tokens(x_RV[row]).ids_N.tolist().index(token)


@pytest.mark.slow
def test_inactive_rows_do_not_change(kernels: Interpreted) -> None:
    rng = np.random.default_rng(11)
    x_RV, steps = rng.normal(size=(4, 600)).astype(np.float32), edges.words(rng, 4)
    params = [list(one) for one in (FusedParams(k=5), FusedParams(p=0.5), FusedParams(t=0.0), FusedParams(p=0.9))]
    expected = kernels.call("sample", x_RV, params, steps, steps)
    active = np.array([True, False, False, True])
    got = kernels.call("sample", x_RV, params, steps, steps, {"active": active})
    assert got["tokens"].tolist() == np.where(active, expected["tokens"], -1).tolist()
    assert (got["steps"] - steps).tolist() == [1, 0, 0, 1]


@pytest.mark.slow
def test_a_row_does_not_depend_on_other_rows(kernels: Interpreted) -> None:
    """Also independent of the number of rows per program of the first kernel."""
    rng = np.random.default_rng(4)
    x_RV, params, _ = edges.fused_rows(rng, 33, 300)
    seeds, steps = edges.words(rng, 33), edges.words(rng, 33)
    all_of_them = kernels.call("sample", x_RV, [list(one) for one in params], seeds, steps)
    del all_of_them["reads"]
    for row in (0, 17, 32):
        part = slice(row, row + 1)
        got = kernels.call("sample", x_RV[part], [list(params[row])], seeds[part], steps[part])
        del got["reads"]
        assert {name: column.tolist() for name, column in got.items()} == {
            name: column[part].tolist() for name, column in all_of_them.items()
        }


def test_unsupported_inputs_are_rejected(kernels: Interpreted) -> None:
    zeros, x_RV = np.zeros(2, np.int64), np.zeros((2, 9), np.float32)
    with pytest.raises(ValueError, match="room for up to 1 rows of 9"):
        kernels.call("sample", x_RV, [list(FusedParams())] * 2, zeros, zeros, {"rows": 1})
    with pytest.raises(ValueError, match="float64"):
        kernels.call("sample", x_RV, [list(FusedParams())] * 2, zeros, zeros, {"dtype": "float64"})
    with pytest.raises(ValueError, match="slots must be"):
        kernels.call("sample", x_RV, [list(FusedParams())], zeros[:1], zeros[:1])
    with pytest.raises(ValueError, match="mask must be"):
        kernels.call("sample", x_RV, [list(FusedParams())] * 2, zeros, zeros, {"mask": np.zeros((2, 0), np.int32)})
    assert len(kernels.call("sample", x_RV, [list(FusedParams())] * 2, zeros, zeros)["tokens"]) == 2


@pytest.mark.slow
def test_tokens_are_written_to_the_requested_output(kernels: Interpreted) -> None:
    zeros, x_RV = np.zeros(2, np.int64), np.full((2, 300), -np.inf, np.float32)
    x_RV[0, 280] = 1.0
    got = kernels.call("sample", x_RV, [list(FusedParams(k=5))] * 2, zeros, zeros, {"out": True})
    assert got["tokens"].tolist() == [280, -1]


@pytest.mark.slow
def test_tokens_of_the_pipeline_equal_the_reference(kernels: Interpreted) -> None:
    """End to end, from the stages and their seed."""
    x = np.random.default_rng(5).normal(size=600).astype(np.float32)
    stages = edges.pipeline(FusedParams(t=0.8, k=40, p=0.95), 77)
    fused = to_fused_pipeline(simplify(stages))
    assert not isinstance(fused, str)
    got = kernels.call("sample", x[None], [list(fused.params)], np.array([77]), np.array([5]))
    assert got["tokens"].tolist() == [reference.draw(x, (*stages[:-1], Gumbel(77)), 77, 5)]

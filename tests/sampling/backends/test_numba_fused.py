"""The fused CPU kernel equals the reference: the same token for every row, parameter, seed and step."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tiers
from edge_rows import KINDS, row
from stage_examples import assert_logprobs_close

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.cpu import evaluation as composed
from nucleate.sampling.cpu.block_ops import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, convert_row
from nucleate.sampling.pipeline import simplify, to_fused_pipeline
from nucleate.sampling.stages import Categorical, Greedy, Gumbel, MinP, Temperature, TopK, TopNSigma, TopP, Typical
from nucleate.sampling.token_logprobs import logprobs

SIZES = (1, 2, 5, 100, 255, 256, 257, 1000, 5000, 20_000)


def params(rng: np.random.Generator, size: int) -> nc.SamplingParams:
    def one(*values: float) -> float:
        return float(rng.choice(values))

    return nc.SamplingParams(
        temperature=one(1, 1, 0.7, 0.8, 1.5, 0.01, 5, 0),
        top_n_sigma=one(0, 0, 0, 1, 0.1, 3),
        top_k=int(one(0, 0, 1, 2, 5, 40, 300, 1000, 3000, size)),
        min_p=one(0, 0, 0.05, 0.3, 1e-4, 1),
        top_p=one(1, 1, 0.9, 0.5, 0.99, 0.1, 1e-9, 1 - 1e-9),
        seed=int(rng.integers(2**63)) * 2 + int(rng.integers(2)),
    )


def differences(count: int, seed: int) -> list[object]:
    """The random rows whose token differs, through the public function."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        size, kind = int(rng.choice(SIZES)), str(rng.choice(KINDS))
        logits, requested, step = row(rng, size, kind), params(rng, size), int(rng.integers(2**40))
        assert not isinstance(to_fused_pipeline(simplify(requested.build_pipeline())), str)
        got = int(nc.sample(logits[None], requested, step=step, backend="cpu")[0])
        if got != (expected := int(nc.sample(logits[None], requested, step=step, backend="reference")[0])):
            found.append((size, kind, requested, step, got, expected))
    return found


@pytest.mark.slow
def test_every_token_equals_the_reference() -> None:
    assert differences(tiers.count(400, 4000), 0) == []


@pytest.mark.exhaustive
def test_every_token_of_very_many_rows_equals_the_reference() -> None:
    assert differences(100_000, 1) == []


@pytest.mark.parametrize("size", [32_000, 50_257, 128_256, 151_936])
@pytest.mark.fast_cases(0)
def test_full_vocabularies(size: int) -> None:
    rng = np.random.default_rng(size)
    for scale in (1.0, 2.5):
        logits = (rng.normal(size=(1, size)) * scale).astype(np.float32)
        logits[0, rng.integers(size, size=40)] += np.linspace(2, 12, 40) * (scale > 1)
        for requested in (
            nc.SamplingParams(temperature=0.7, seed=1),
            nc.SamplingParams(temperature=0.8, top_k=40, min_p=0.05, top_p=0.95, seed=2),
            nc.SamplingParams(top_p=0.9, seed=3),
            nc.SamplingParams(top_k=1000, top_p=0.9, seed=4),
            nc.SamplingParams(top_k=20_000, seed=4),
            nc.SamplingParams(min_p=0.001, top_p=0.99, seed=5),
            nc.SamplingParams(temperature=0),
        ):
            step = int(rng.integers(1000))
            got = nc.sample(logits, requested, step=step, backend="cpu")
            assert got.tolist() == nc.sample(logits, requested, step=step, backend="reference").tolist(), requested


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("position", [0, 255, 256, 700, 999])
def test_an_invalid_row_is_an_error_and_affects_no_other_row(bad: float, position: int) -> None:
    logits = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32)
    good = nc.sample(logits, (Temperature(0.7), TopP(0.9), Gumbel(1)), backend="cpu")
    logits[1, position] = bad
    for stages in ((Temperature(0.7), TopP(0.9), Gumbel(1)), (TopK(5), Gumbel(1)), (Greedy(),)):
        with pytest.raises(nc.LogitsError) as caught:
            nc.sample(logits, stages, backend="cpu")
        assert caught.value.errors == {1: f"{'+inf' if bad == np.inf else 'NaN'} at token {position}"}
    with pytest.raises(nc.LogitsError) as caught:
        nc.sample(logits, (Temperature(0.7), TopP(0.9), Gumbel(1)), backend="cpu")
    assert caught.value.token_ids is not None
    assert caught.value.token_ids.tolist() == [good[0], -1, good[2]]
    logits[1] = -np.inf
    with pytest.raises(nc.LogitsError, match="row 1: every token is at -inf"):
        nc.sample(logits, (TopK(5), Gumbel(1)), backend="cpu")


@pytest.mark.slow
def test_many_rows_on_several_threads_equal_single_rows() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(300, 32_000)).astype(np.float32)
    requested = [nc.SamplingParams(temperature=0.7, top_p=0.9, top_k=50, seed=i) for i in range(300)]
    together = nc.sample(logits, requested, backend="cpu").tolist()
    assert together[::37] == [
        int(nc.sample(logits[i : i + 1], requested[i], backend="cpu")[0]) for i in range(0, 300, 37)
    ]
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = nc.sample(logits, requested, backend="cpu").tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[i] == together for i in range(3))


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ((Typical(0.9), Gumbel(1)), r"Typical\(0.9\) is not supported by the fused kernel"),
        ((TopP(0.9), TopK(5), Gumbel(1)), r"TopK\(5\) is not supported by the fused kernel at this position"),
        (
            (MinP(0.1), Temperature(0.5), TopK(5), Gumbel(1)),
            r"TopK\(5\) is not supported by the fused kernel at this position",
        ),
        (
            (TopK(5), TopNSigma(1.0), Gumbel(1)),
            r"TopNSigma\(1.0\) is not supported by the fused kernel at this position",
        ),
        ((TopK(5), TopK(3), Gumbel(1)), r"TopK\(3\) is not"),
        ((TopK(5, with_ties=True), Gumbel(1)), r"TopK\(k=5, with_ties=True\) is not"),
        ((TopP(0.5, of_full_mass=True), Gumbel(1)), r"of_full_mass=True\) is not"),
        ((Temperature(1e-9), Gumbel(1)), r"its temperature is not from 0.0001 to 10000"),
        ((Temperature(0.01), TopP(0.5), Temperature(0.001), Gumbel(1)), r"its temperature is not from 0.0001 to 10000"),
        ((TopP(0.5), Categorical(1)), r"Categorical\(1\) is not supported by the fused kernel"),
    ],
)
def test_unsupported_pipelines_return_a_reason(stages: tuple[object, ...], why: str) -> None:
    plan = nc.explain(stages, backend="cpu")  # type: ignore[arg-type]
    assert plan.backend == "cpu"
    assert plan.path == "composed stages"
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(plan.why)
    logits = np.random.default_rng(0).normal(size=(1, 300)).astype(np.float32)
    expected = reference.draw(logits[0], stages, 1, 0)  # type: ignore[arg-type]
    assert nc.sample(logits, stages, backend="cpu").tolist() == [expected]  # type: ignore[arg-type]


def test_logprobs_equal_the_reference() -> None:
    rng = np.random.default_rng(0)
    for turn in range(tiers.count(120, 800)):
        size, kind = int(rng.choice(SIZES)), str(rng.choice(KINDS))
        x = row(rng, size, kind)
        inside = np.flatnonzero(x > -np.inf)
        top, requested = int(rng.choice([0, 1, 5, 20, 300, 10_000])), rng.integers(size, size=turn % 4).tolist()
        actual = composed.step_logprobs(x, int(rng.choice(inside)), (top, tuple(requested)))
        expected = logprobs(np.arange(size), x, actual.chosen.token_id, top, tuple(requested))
        assert_logprobs_close(actual, expected)


@pytest.mark.slow
def test_every_half_precision_number_is_converted_exactly() -> None:
    bits = np.arange(65536).astype(np.uint16)
    for start, stop in ((0, 65536), (3, 65533), (7, 7), (5, 20), (65530, 65536)):
        part = bits[start:stop]
        wide = np.full(len(part) + 1, 5.0, np.float32)
        convert_row(part.ctypes.data, FLOAT16, wide[:-1])
        assert np.array_equal(wide[:-1], part.view(np.float16).astype(np.float32), equal_nan=True)
        convert_row(part.ctypes.data, BFLOAT16, wide[:-1])
        assert np.array_equal(wide[:-1], (part.astype(np.uint32) << 16).view(np.float32), equal_nan=True)
        assert wide[-1] == 5.0


def test_float64_is_rounded_like_numpy() -> None:
    rng = np.random.default_rng(0)
    wide = rng.integers(2**64, size=20_001, dtype=np.uint64).view(np.float64)
    wide[:4000] = rng.normal(size=4000) * 10.0 ** rng.integers(-50, 45, size=4000)
    wide[4000:4003] = 1e39, -1e39, 3.4028235677973366e38
    narrow = np.empty(len(wide), np.float32)
    convert_row(wide.ctypes.data, FLOAT64, narrow)
    with np.errstate(all="ignore"):
        expected = wide.astype(np.float32)
    assert np.array_equal(narrow, expected, equal_nan=True)
    again = np.empty(len(wide), np.float32)
    convert_row(narrow.ctypes.data, FLOAT32, again)
    assert np.array_equal(again.view(np.uint32), narrow.view(np.uint32))
